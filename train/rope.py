"""Rotary position embedding: plain and YaRN frequencies, half-split and interleaved pairs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from configs.schema import Yarn


def frequencies(dim: int, theta: float, yarn: Yarn | None = None, device: torch.device | None = None) -> Tensor:
    """Angle per position of each of the dim / 2 pairs, fp32.

    YaRN slows the pairs that turn less than `beta_slow` times within the original length by `factor`, keeps those that turn
    more than `beta_fast` times, and blends between the two.
    """
    pairs = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
    inverse = theta ** (-pairs / dim)
    if yarn is None:
        return inverse
    low = math.floor(_pair_that_turns(yarn.beta_fast, dim, theta, yarn.original_max_position_embeddings))
    high = math.ceil(_pair_that_turns(yarn.beta_slow, dim, theta, yarn.original_max_position_embeddings))
    low, high = max(low, 0), min(high, dim - 1)
    slowed = ((pairs / 2 - low) / max(high - low, 1e-3)).clamp(0, 1)
    return inverse * (1 - slowed) + inverse / yarn.factor * slowed


def softmax_scale(dim: int, yarn: Yarn | None = None) -> float:
    """What scores are multiplied by: 1 / sqrt(dim), with YaRN times mscale squared."""
    mscale = 1.0 if yarn is None else 0.1 * yarn.mscale * math.log(yarn.factor) + 1.0
    return dim**-0.5 * mscale**2


def rotate(x: Tensor, positions: Tensor, inverse: Tensor, interleaved: bool = False) -> Tensor:
    """Turn the pairs of x [..., heads, d] by positions [...] times inverse [d / 2]; angles, sines and products in fp32.

    Pairs are (i, i + d / 2) as in Llama and Qwen, or (2i, 2i + 1) where `interleaved`, as in DeepSeek and Kimi.
    """
    angle = (positions[..., None].to(inverse.dtype) * inverse)[..., None, :]
    cos, sin = angle.cos(), angle.sin()
    left, right = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = left * cos - right * sin, right * cos + left * sin
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)


def _pair_that_turns(times: float, dim: int, theta: float, length: int) -> float:
    """Index of the pair, as a real number, that turns so many times within `length` positions."""
    return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))
