"""Acceptance without an engine: the text up to the first rejection is the verifier's own, so drafting from each of its tokens,
teacher-forced, tells with which probability an engine would have accepted there; its walk over the text follows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from train.acceptance import DRAWN, survival
from train.draft import Draft
from train.verifier import FrozenVerifier

ANCHORS_AT_ONCE = 32


@dataclass
class Response:
    """One response of N + 1 tokens, drafted at each but the last. `survival` [N, B]: P(at least k + 1 drafts accepted);
    `confidence` [N, B]: logits of the draft's own guess; `log_p` [N, B]: of the text's tokens, NaN beyond its end."""

    survival: np.ndarray
    confidence: np.ndarray
    log_p: np.ndarray


@torch.no_grad()
def simulate(
    draft: Draft,
    frozen: FrozenVerifier,
    token_ids: list[int],
    spans: list[tuple[int, int]],
    states: Tensor,
    rule: str = "greedy",
    temperature: float = 1.0,
    every: int = 1,
    slots: int | None = None,
) -> list[Response]:
    """Draft at every token (or each `every`-th) of the responses `spans` [start, stop) of a text, `slots` tokens (default:
    a block).

    token_ids [T]; states [T, m + 1, H] of its tokens. A response ends the data: a slot beyond it is not accepted.
    """
    device, block, markov = frozen.embedding.device, slots or draft.spec.block_size, draft.markov_head
    tokens, states = torch.tensor(token_ids, device=device), states.to(device)
    context = draft.context(states[:, :-1].flatten(1).float()[None], torch.arange(len(tokens), device=device)[None])
    q_next = _next_probability(frozen, states[:, -1], tokens, temperature) if rule in DRAWN else tokens.new_ones(len(tokens))
    responses = []
    for start, stop in spans:
        parts = []
        for anchors in torch.arange(start, stop - 1, every, device=device).split(ANCHORS_AT_ONCE):
            hidden = draft.block(frozen.slot_embeddings(tokens[anchors], draft.spec.mask_token_id, block)[None], anchors[None], context)[0]
            before = anchors[:, None] + torch.arange(block, device=device)  # of the token right before the one that a slot predicts
            inside, before = before < stop - 1, before.clamp_max(stop - 2)
            target, known = frozen.heads.index_of(tokens[before + 1])
            embedding = markov.markov_w1(tokens[before])
            logits = frozen.heads.draft_logits(hidden) + markov.markov_w2(embedding)
            hit = inside & known & (logits.argmax(-1) == target)
            log_p = (logits.gather(-1, target[..., None]) / temperature).squeeze(-1) - (logits / temperature).logsumexp(-1)
            log_p = log_p.masked_fill(~known, -torch.inf)
            survives = survival(rule, hit, log_p.exp() * inside, q_next[before])
            parts.append((survives, draft.confidence_head(hidden, embedding), log_p.masked_fill(~inside, torch.nan)))
        columns = zip(*parts, strict=True) if parts else ((torch.zeros(0, block),),) * 3
        responses.append(Response(*(torch.cat(column).double().cpu().numpy() for column in columns)))
    return responses


def _next_probability(frozen: FrozenVerifier, last: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """The verifier's probability [T] of the token after each one (of the last: of the first)."""
    following = tokens.roll(-1)
    parts = zip(last.split(256), following.split(256))
    return torch.cat([(frozen.logits(part) / temperature).softmax(-1).gather(-1, after[:, None]).squeeze(-1) for part, after in parts])


@dataclass
class Walk:
    """An engine's way over a response, in expectation: `visits` [N] probability of a forward at each token, `emitted` [N] tokens
    that one there emits (the last block is cut), `forwards` and their `variance` given the text."""

    visits: np.ndarray
    emitted: np.ndarray
    forwards: float
    variance: float


def expected_walk(survival: np.ndarray) -> Walk:
    """Exact expectation over the engine's draws, of which greedy has none. survival [N, B] as in `Response`."""
    count, block = survival.shape
    exactly = -np.diff(survival, axis=1, prepend=1.0, append=0.0)  # [N, B + 1]: that so many drafts are accepted
    visits, left = np.zeros(count + block + 1), np.zeros(count + block + 1)
    visits[:1] = 1.0
    for at in range(count):
        visits[at + 1 : at + block + 2] += visits[at] * exactly[at]
    variance = np.zeros(count)
    for at in reversed(range(count)):  # forwards still to come
        after = left[at + 1 : at + block + 2]
        left[at] = 1 + exactly[at] @ after
        variance[at] = exactly[at] @ (after - exactly[at] @ after) ** 2
    room = count - np.arange(count)[:, None]
    emitted = (exactly * np.minimum(np.arange(1, block + 2), room)).sum(1)
    return Walk(visits[:count], emitted, float(visits[:count].sum()), float(visits[:count] @ variance))


def walk(survival: np.ndarray, random: np.random.Generator | None = None) -> list[int]:
    """Tokens emitted by each forward of one engine run over a response; without `random` for rules that draw nothing."""
    emitted, position = [], 0
    while position < len(survival):
        accepted = int((survival[position] > (random.random() if random else 0.5)).sum())
        emitted.append(min(accepted + 1, len(survival) - position))
        position += emitted[-1]
    return emitted
