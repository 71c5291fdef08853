"""Attention of draft blocks over verifier context and over themselves (`DSpark`'s context K/V injection)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Packing:
    """Documents of a packed batch: document i owns the context tokens `tokens[i]` and the blocks `blocks[i]`, both in order."""

    tokens: list[slice]
    blocks: list[slice]


def context_visible(anchors: Tensor, length: int, block_size: int, window: int | None) -> Tensor:
    """Which context tokens each slot sees: those strictly before its anchor, since the verifier's state *of* the anchor
    does not exist yet when drafting, and within the engine's sliding window (query position - key position <= window - 1).

    anchors: [..., A] positions in the document. Returns bool [..., A, B, length].
    """
    keys = torch.arange(length, device=anchors.device)
    visible = keys < anchors[..., None, None]
    if window is None:
        return visible.expand(*anchors.shape, block_size, length)
    slots = torch.arange(block_size, device=anchors.device)
    return visible & (keys > (anchors[..., None] + slots)[..., None] - window)


def block_visible(block_size: int, causal: bool, window: int | None, device: torch.device | None = None) -> Tensor:
    """Which slots of its own block each slot sees: bool [B, B]. A window is symmetric unless causal, as in the engine."""
    slots = torch.arange(block_size, device=device)
    distance = slots[:, None] - slots[None, :]
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if window is None else visible & (distance.abs() < window)


def attend(
    query: Tensor,
    context_kv: tuple[Tensor, Tensor],
    block_kv: tuple[Tensor, Tensor],
    anchors: Tensor,
    causal: bool,
    window: int | None,
    packing: Packing | None = None,
) -> Tensor:
    """Attention of blocks as `two_part` has it. With a packing D is 1, all documents of the batch share T and A, and each sees
    itself alone."""
    if packing is None:
        return two_part(query, context_kv, block_kv, anchors, causal, window)
    parts = []
    for tokens, blocks in zip(packing.tokens, packing.blocks, strict=True):
        context, own = ([x[:, part] for x in pair] for part, pair in ((tokens, context_kv), (blocks, block_kv)))
        parts.append(two_part(query[:, blocks], context, own, anchors[:, blocks], causal, window))
    return torch.cat(parts, 1)


def two_part(
    query: Tensor, context_kv: tuple[Tensor, Tensor], block_kv: tuple[Tensor, Tensor], anchors: Tensor, causal: bool, window: int | None
) -> Tensor:
    """Two-part attention: keys of the document's context and keys of the own block, merged by their shared log-sum-exp,
    so that no mask over context and all blocks at once ever exists.

    query [D, A, B, heads, d], already scaled; context keys [D, T, kv_heads, d] and values [D, T, kv_heads, v]; block keys and
    values [D, A, B, kv_heads, d or v]; anchors [D, A]. D documents, A anchors of each, B slots. Returns [D, A, B, heads, v].
    """
    (context_key, context_value), (block_key, block_value) = context_kv, block_kv
    documents, count, slots, heads = query.shape[:4]
    length, groups = context_key.shape[1:3]
    grouped = query.unflatten(3, (groups, heads // groups)).permute(0, 3, 4, 1, 2, 5)  # [D, G, R, A, B, d]

    context = (grouped.flatten(2, 4) @ context_key.permute(0, 2, 3, 1)).view(*grouped.shape[:5], length)
    hidden = ~context_visible(anchors, length, slots, window)
    context = context.masked_fill(hidden[:, None, None], torch.finfo(query.dtype).min)
    own = grouped @ block_key.permute(0, 3, 1, 4, 2)[:, :, None]  # [D, G, R, A, B, B]
    own = own.masked_fill(~block_visible(slots, causal, window, query.device), torch.finfo(query.dtype).min)

    # A slot always sees itself, so the shared maximum is finite and a slot without any context merges to its block alone.
    peak = torch.maximum(context.detach().amax(-1, keepdim=True), own.detach().amax(-1, keepdim=True))
    context, own = (context - peak).exp(), (own - peak).exp()
    mixed = (context.flatten(2, 4) @ context_value.transpose(1, 2)).unflatten(2, grouped.shape[2:5])
    mixed = mixed + own @ block_value.permute(0, 3, 1, 2, 4)[:, :, None]
    mixed = mixed / (context.sum(-1, keepdim=True) + own.sum(-1, keepdim=True))
    return mixed.permute(0, 3, 4, 1, 2, 5).reshape(documents, count, slots, heads, -1)
