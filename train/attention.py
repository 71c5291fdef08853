"""Attention of draft blocks over verifier context and over themselves (`DSpark`'s context K/V injection)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

SCORE_BYTES = 4 << 20  # of the scores of blocks with their context that are held at once on CPUs


@dataclass
class Packing:
    """Documents of a packed batch: document i owns the context tokens `tokens[i]` and the blocks `blocks[i]`, both in order."""

    tokens: list[slice]
    blocks: list[slice]
    masks: dict[tuple, BlockMask] = field(default_factory=dict)  # FlexAttention's, which layers of a kind share


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
    itself alone; GPUs do that in one kernel."""
    if packing is None:
        return two_part(query, context_kv, block_kv, anchors, causal, window)
    kernel = flex if query.is_cuda else by_document
    return kernel(query, context_kv, block_kv, anchors, causal, window, packing)


def by_document(query: Tensor, context_kv, block_kv, anchors: Tensor, causal: bool, window: int | None, packing: Packing) -> Tensor:
    """`two_part` of one document after the other, a few blocks at a time, whose scores are computed again for the backward pass."""
    parts = []
    for tokens, blocks in zip(packing.tokens, packing.blocks, strict=True):
        length, (slots, heads) = tokens.stop - tokens.start, query.shape[2:4]
        at_once = max(1, SCORE_BYTES // (query.element_size() * length * slots * heads))
        for first in range(blocks.start, blocks.stop, at_once):
            some = slice(first, min(first + at_once, blocks.stop))
            seen = slice(tokens.start, tokens.start + max(1, int(anchors[0, some].max())))  # none of them sees a later token
            context, own = ([x[:, part] for x in pair] for part, pair in ((seen, context_kv), (some, block_kv)))
            arguments = query[:, some], context, own, anchors[:, some], causal, window
            parts.append(checkpoint(two_part, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, 1)


def flex(query: Tensor, context_kv, block_kv, anchors: Tensor, causal: bool, window: int | None, packing: Packing) -> Tensor:
    """FlexAttention over the keys of all context tokens, then of all slots; tiles of the mask in which nothing is seen cost nothing."""
    count, slots = query.shape[1:3]
    key, value = (torch.cat((context, own.flatten(1, 2)), 1).transpose(1, 2) for context, own in zip(context_kv, block_kv))
    query = query.flatten(1, 2).transpose(1, 2)
    if (causal, window) not in packing.masks:
        visible = packed_visible(packing, anchors[0], context_kv[0].shape[1], slots, causal, window)
        create = _compiled(create_block_mask) if query.is_cuda else create_block_mask
        packing.masks[causal, window] = create(visible, None, None, query.shape[2], key.shape[2], device=query.device)
    attention = _compiled(flex_attention) if query.is_cuda else flex_attention
    query, key = query.to(value.dtype), key.to(value.dtype)
    mixed = attention(query, key, value, block_mask=packing.masks[causal, window], scale=1.0, enable_gqa=True)
    return mixed.transpose(1, 2).unflatten(1, (count, slots))


_compiled = cache(torch.compile)


def packed_visible(packing: Packing, anchors: Tensor, length: int, slots: int, causal: bool, window: int | None) -> Callable[..., Tensor]:
    """FlexAttention's question whether query q sees key k: of document, block and position of each. anchors: [A], in the document."""
    token_document = torch.full((length,), -1)
    token_position, block_document = torch.zeros(length, dtype=torch.int64), torch.zeros(len(anchors), dtype=torch.int64)
    for number, (tokens, blocks) in enumerate(zip(packing.tokens, packing.blocks, strict=True)):
        token_document[tokens], block_document[blocks] = number, number
        token_position[tokens] = torch.arange(tokens.stop - tokens.start)
    token_document, token_position, block_document = (x.to(anchors.device) for x in (token_document, token_position, block_document))
    anchor, document = anchors.repeat_interleave(slots), block_document.repeat_interleave(slots)
    block = torch.arange(len(anchors), device=anchors.device).repeat_interleave(slots)
    position = anchor + torch.arange(slots, device=anchors.device).repeat(len(anchors))
    key_document, key_position = torch.cat((token_document, document)), torch.cat((token_position, position))
    key_block = torch.cat((torch.full_like(token_document, -1), block))

    def visible(_batch, _head, q, k):
        context = (key_block[k] < 0) & (key_document[k] == document[q]) & (key_position[k] < anchor[q])
        seen = context | (key_block[k] == block[q])
        if causal:
            seen = seen & (key_position[k] <= position[q])
        return seen if window is None else seen & ((position[q] - key_position[k]).abs() < window)

    return visible


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
