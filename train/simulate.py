"""Acceptance without an engine: along a response that the verifier generated greedily, the engine's walk is deterministic.

The prefix before the first rejection is the data itself, so drafting from every response position, teacher-forced, tells what
an engine would have accepted there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from train.draft import Draft
from train.verifier import FrozenVerifier

ANCHORS_AT_ONCE = 32


@torch.no_grad()
def accepted_everywhere(draft: Draft, frozen: FrozenVerifier, token_ids: list[int], prompt: int, taps: Tensor) -> list[int]:
    """Drafts accepted (greedy) if the engine drafted at each response token but the last one.

    token_ids [T], of which the first `prompt` are the prompt; taps [T, m, H] of the same tokens. The response ends the data:
    a slot beyond it is not accepted.
    """
    device, block = frozen.embedding.device, draft.spec.block_size
    tokens = torch.tensor(token_ids, device=device)
    context = draft.context(taps.to(device).flatten(1).float()[None], torch.arange(len(tokens), device=device)[None])
    padded = F.pad(tokens, (0, block), value=-1)
    counts: list[int] = []
    for anchors in torch.arange(prompt, len(tokens) - 1, device=device).split(ANCHORS_AT_ONCE):
        slots = frozen.slot_embeddings(tokens[anchors], draft.spec.mask_token_id, block)
        hidden = draft.block(slots[None], anchors[None], context)[0]
        follow = anchors[:, None] + torch.arange(block, device=device)
        bias = draft.markov_head.markov_w2(draft.markov_head.markov_w1(padded[follow].clamp_min(0)))
        guess = frozen.heads.token_ids((frozen.heads.draft_logits(hidden) + bias).argmax(-1))
        counts += (guess == padded[follow + 1]).cumprod(1).sum(1).tolist()
    return counts


def walk(accepted: list[int]) -> list[int]:
    """Tokens emitted by each verifier forward of an engine that starts at the first response token.

    accepted[i]: drafts accepted at response token i; there are len(accepted) tokens to emit after the first one.
    """
    emitted, position = [], 0
    while position < len(accepted):
        emitted.append(min(accepted[position] + 1, len(accepted) - position))
        position += emitted[-1]
    return emitted
