"""Warm start of a draft from its verifier and its data (`draft.init`): each part is a key and works by itself.

Where these come from: a short run on few samples spends most of its time finding what the verifier already knows.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from configs.schema import Config
from store.verifier import text_config
from train.draft import Draft
from train.verifier import FrozenVerifier, read_tensor

FINAL_NORM_SCALE = 0.3  # at 1 the first cross-entropy was over 50: an untrained draft must not be that sure
NOISE = 0.02  # of the projection of the taps that are not passed through


@torch.no_grad()
def warm_start(draft: Draft, frozen: FrozenVerifier, dataset, states: Tensor, config: Config) -> None:
    """states [T, m + 1, H]: of the run's first samples, to measure scales on."""
    init = config.draft.init
    if init.taps == "scaled":
        taps = states[:, :-1].flatten(1).float()
        draft.tap_scale.copy_(taps.square().mean(0).sqrt().clamp_min(1e-6))
    if init.projection == "last_tap":
        pass_last_tap(draft, config)
    if init.layers == "verifier":
        copy_layers(draft, frozen, states, config)
    if init.markov == "bigram":
        from train.bigram import bigram_counts, bigram_factors  # scipy, which no other start needs

        first, second = bigram_factors(bigram_counts(dataset, draft.spec.vocab_size), draft.spec.markov_rank)
        draft.markov_head.markov_w1.weight.copy_(first)
        draft.markov_head.markov_w2.weight.copy_(second if draft.kept is None else second[draft.kept])


def pass_last_tap(draft: Draft, config: Config) -> None:
    """The context feature starts as the last tap, normed as the verifier's layer that reads it norms it."""
    hidden, tap = draft.spec.hidden_size, draft.spec.taps[-1]
    scale = draft.tap_scale[-hidden:]
    draft.fc.weight[:, -hidden:] = torch.diag(scale)
    draft.fc.weight[:, :-hidden].mul_(NOISE * scale.mean() / 0.02)
    norm = read_tensor(config.verifier.path, rf"layers\.{tap}\.input_layernorm\.weight")
    if norm is not None:
        draft.hidden_norm.weight.copy_(norm)


def copy_layers(draft: Draft, frozen: FrozenVerifier, states: Tensor, config: Config) -> None:
    """The verifier's last layers, where shapes fit; q and k norms take the size that the verifier's q and k have."""
    count = text_config(config.verifier.path)["num_hidden_layers"]
    first = count - draft.spec.layers
    for number, layer in enumerate(draft.layers):
        for name, parameter in layer.named_parameters():
            tensor = read_tensor(config.verifier.path, rf"layers\.{first + number}\.{re.escape(name)}")
            if tensor is not None and tensor.shape == parameter.shape:
                parameter.copy_(tensor)
        if draft.spec.gqa:
            # The nearest tap stands in for this layer's own input.
            nearest = min(range(len(draft.spec.taps)), key=lambda i, at=first + number: abs(draft.spec.taps[i] - at))
            x, own = layer.input_layernorm(states[:, nearest].float()), layer.self_attn
            for projection, norm in ((own.q_proj, own.q_norm), (own.k_proj, own.k_norm)):
                norm.weight.fill_(projection(x).square().mean().sqrt())
    draft.norm.weight.copy_(FINAL_NORM_SCALE * frozen.heads.scale * frozen.norm)
