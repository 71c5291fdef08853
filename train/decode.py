"""Closed-loop speculative decoding: the draft proposes, the real verifier checks, both with their own KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from extract.hf import HFVerifier
from train.acceptance import DRAWN, verify
from train.draft import Context, Draft
from train.verifier import FrozenVerifier


@dataclass
class Decoded:
    """One answered prompt. `accepted[i]` and `emitted[i]`: drafts accepted and tokens emitted by verifier forward i after the
    prefill (its bonus counts, the last block is cut at the end of the text); `gaps[j]`: the verifier's top-2 gap of logits
    where response token j was chosen."""

    response_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)


class DraftCache:
    """What every draft layer keeps of the context, [R, length, ...], written as the verifier's states arrive."""

    def __init__(self, draft: Draft, rows: int, length: int, device: torch.device):
        shapes = [layer.self_attn.cached_shapes for layer in draft.layers]
        self.draft = draft
        self.layers = [tuple(torch.zeros((rows, length, *shape), device=device) for shape in layer) for layer in shapes]

    def write(self, rows: Tensor, positions: Tensor, states: Tensor) -> None:
        """States [R, Q, m + 1, H] of tokens at positions [R, Q]. What is later rejected is overwritten, and not seen before."""
        new = self.draft.context(states[:, :, :-1].flatten(2).float(), positions)
        for (keys, values), (key, value) in zip(self.layers, new, strict=True):
            keys[rows[:, None], positions] = key
            values[rows[:, None], positions] = value

    def read(self, rows: Tensor, length: int) -> Context:
        return [(keys[rows, :length], values[rows, :length]) for keys, values in self.layers]


@dataclass
class Sampler:
    """How both sides choose tokens: the rule of acceptance (`train.acceptance`), and the temperature where it draws."""

    rule: str = "greedy"
    temperature: float = 1.0
    generator: torch.Generator | None = None

    def distribution(self, logits: Tensor) -> Tensor:
        """The verifier's q; greedy compares logits as they are."""
        if self.rule == "greedy":
            return logits
        return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature).softmax(-1)

    def first(self, logits: Tensor) -> Tensor:
        """The token [R] after a prefill, logits [R, V]."""
        q = self.distribution(logits)
        return q.argmax(-1) if self.rule == "greedy" else torch.multinomial(q, 1, generator=self.generator).squeeze(1)


def propose(draft: Draft, frozen: FrozenVerifier, context: Context, tokens: Tensor, anchors: Tensor, sampler: Sampler):
    """Drafts [R, B] after anchor tokens [R] at positions anchors [R], and the distributions [R, B, V] that they were drawn from
    (None for argmax): one pass, then the Markov head slot by slot."""
    slots = frozen.slot_embeddings(tokens, draft.spec.mask_token_id, draft.spec.block_size)
    hidden = draft.block(slots[:, None], anchors[:, None], context)[:, 0]
    logits = frozen.heads.draft_logits(hidden)
    markov, drafts, drawn_from = draft.markov_head, [], []
    for slot in range(draft.spec.block_size):
        scores = logits[:, slot] + F.embedding(tokens, markov.markov_w1.weight) @ markov.markov_w2.weight.mT
        if sampler.rule in DRAWN:
            p = (scores / sampler.temperature).softmax(-1)
            drawn_from.append(frozen.heads.spread(p))
            tokens = frozen.heads.token_ids(torch.multinomial(p, 1, generator=sampler.generator).squeeze(1))
        else:
            tokens = frozen.heads.token_ids(scores.argmax(-1))
        drafts.append(tokens)
    return torch.stack(drafts, 1), torch.stack(drawn_from, 1) if drawn_from else None


@torch.no_grad()
def speculate(
    verifier: HFVerifier, draft: Draft, frozen: FrozenVerifier, prompts: list[list[int]], max_tokens: int, sampler: Sampler | None = None
) -> list[Decoded]:
    """Answer prompts, all of them side by side, each until a stop token or `max_tokens` tokens; greedily without a sampler."""
    block, device, sampler = draft.spec.block_size, verifier.device, sampler or Sampler()
    results = [Decoded() for _ in prompts]
    longest = max(map(len, prompts)) + max_tokens + block + 1
    slots, cache = verifier.slots(len(prompts), longest), DraftCache(draft, len(prompts), longest, device)
    tokens = _prefill(verifier, slots, cache, prompts, results, sampler)
    active = _still_running(results, range(len(prompts)), verifier, max_tokens)
    while active:
        rows = torch.tensor(active)
        anchors = slots.lengths[rows].to(device)
        drafts, p = propose(draft, frozen, cache.read(rows.to(device), int(anchors.max())), tokens[rows], anchors, sampler)
        logits, states = verifier.step(torch.cat((tokens[rows, None], drafts), 1), slots, rows, keep_states=True)
        cache.write(rows.to(device), anchors[:, None] + torch.arange(block + 1, device=device), states)
        accepted, following = verify(sampler.rule, drafts, p, sampler.distribution(logits), sampler.generator)
        slots.lengths[rows] = (anchors + accepted + 1).cpu()
        tokens[rows] = following
        for row, count, drafted, own, gap in zip(active, accepted.tolist(), drafts.tolist(), following.tolist(), _gaps(logits)):
            _emit(results[row], count, [*drafted[:count], own], gap, verifier, max_tokens)
        active = _still_running(results, active, verifier, max_tokens)
    return results


def _prefill(verifier: HFVerifier, slots, cache: DraftCache, prompts: list[list[int]], results: list[Decoded], sampler: Sampler) -> Tensor:
    """Both caches hold the prompts; returns the first response tokens [R]. The head runs on each prompt's last token only."""
    rows, device = torch.arange(len(prompts)), verifier.device
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    padded = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=device)
    _, states = verifier.step(padded, slots, rows, keep_states=True, logits=False)
    positions = torch.arange(width, device=device).expand(len(prompts), -1)
    cache.write(rows.to(device), positions, states)
    slots.lengths[rows] = lengths - 1
    logits, _ = verifier.step(padded.gather(1, (lengths - 1).to(device)[:, None]), slots, rows)
    first = sampler.first(logits[:, 0])
    for result, token, gap in zip(results, first.tolist(), _gaps(logits)):
        result.response_ids.append(token)
        result.gaps += gap
    return first


def _gaps(logits: Tensor) -> list[list[float]]:
    """Top-2 gap of logits [R, Q, V]: R lists of Q."""
    top = logits.topk(2, -1).values
    return (top[..., 0] - top[..., 1]).tolist()


def _emit(result: Decoded, accepted: int, chosen: list[int], gaps: list[float], verifier: HFVerifier, max_tokens: int) -> None:
    """Take `chosen`, the accepted drafts and the verifier's own next token, cut at a stop token or at `max_tokens`."""
    before = len(result.response_ids)
    for token, gap in zip(chosen, gaps):
        result.response_ids.append(token)
        result.gaps.append(gap)
        if token in verifier.stop_ids or len(result.response_ids) == max_tokens:
            break
    result.accepted.append(accepted)
    result.emitted.append(len(result.response_ids) - before)


def _still_running(results: list[Decoded], rows, verifier: HFVerifier, max_tokens: int) -> list[int]:
    return [row for row in rows if results[row].response_ids[-1] not in verifier.stop_ids and len(results[row].response_ids) < max_tokens]
