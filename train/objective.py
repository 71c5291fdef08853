"""The objective of all slots in one pass over chunks of the vocabulary-sized logits, with closed-form gradients.

Per slot, with z the draft's logits (Markov bias included), p = softmax(z), q the teacher's distribution:
    ce         -log p[token of the data]
    ce_argmax  -log p[argmax q]
    tv         sum max(p - q, 0) = 1 - sum min(p, q)
    l1         2 tv = sum |p - q|
With a reduced draft vocabulary p lives on the kept tokens and q keeps its normaliser over all of them: the overlap is what an
engine would accept. A token that the draft cannot say costs no cross-entropy, and counts as missed.

and, on the confidence head, the binary cross-entropy against sum min(p, q). Every term takes the slot's weight
exp(-k / gamma). Sums are raw: the trainer divides them by the normaliser of the whole step, over all ranks.

No [slots, vocabulary] tensor outlives its chunk. The gradient with respect to z is linear in the terms, so it is formed in
the forward pass, while p and q are at hand, and multiplied by the head and Markov matrices at once:
    d ce / dz = p - onehot,    d tv / dz = p * (1[p > q] - sum over {p > q} of p)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import Loss
from train.heads import Heads

BYTES_PER_LOGIT = 10  # of a chunk: p and q in fp32, and one of them in bf16 on its way


@dataclass
class Slots:
    """Valid slots, in any order. S slots, R distinct teacher rows.

    hidden [S, Hd] final-normed draft states · embedding [S, r] by markov_w1 of the token right before the predicted one
    · labels [S] the data's token · weights [S] · teacher [R, H] final-normed verifier states · teacher_row [S] in 0..R-1, the
    row that predicts the label.
    """

    hidden: Tensor
    embedding: Tensor
    labels: Tensor
    weights: Tensor
    teacher: Tensor
    teacher_row: Tensor


@dataclass
class SlotTerms:
    """Sum of weight * terms (differentiable), and what each slot measured (detached, [S])."""

    weighted_sum: Tensor
    ce: Tensor
    tv: Tensor
    accepted: Tensor  # argmax of the draft is the teacher's: greedy decoding would accept the slot


def slot_weights(block_size: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """exp(-k / gamma) for slot k, fp32 [B]; slot 0 weighs 1."""
    return torch.exp(-torch.arange(block_size, device=device, dtype=torch.float32) / gamma)


def slot_terms(slots: Slots, markov_w2: Tensor, heads: Heads, loss: Loss) -> SlotTerms:
    """Evaluate the vocabulary terms of all slots. markov_w2 [Vd, r].

    Softmax statistics are fp32 (fp64 for fp64 inputs), matrix products have the dtype of the heads.
    """
    order = torch.argsort(slots.teacher_row, stable=True)  # each teacher row is computed once, beside the slots that it teaches
    bounds = list(_chunks(slots.teacher_row[order], heads.verifier.shape[0], loss.chunk_bytes))
    constants = (slots.labels[order], slots.weights[order], slots.teacher, slots.teacher_row[order], heads)
    results = _ChunkedTerms.apply(slots.hidden[order], slots.embedding[order], markov_w2, constants, bounds, loss.terms)
    back = torch.argsort(order)
    return SlotTerms(results[0], *(result[back] for result in results[1:]))


def confidence_sum(logits: Tensor, overlap: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight * BCE of the confidence logits [S] against the soft target sum min(p, q) [S], which has no gradient."""
    return (F.binary_cross_entropy_with_logits(logits.float(), overlap.detach().float(), reduction="none") * weights).sum()


def normaliser(valid_weights: Tensor, denominator: str) -> Tensor:
    """N of the slots with weights [S]: their sum (`weighted`, the paper) or their number (`slots`, the RedHat card)."""
    return valid_weights.sum() if denominator == "weighted" else valid_weights.new_tensor(len(valid_weights))


def _chunks(rows: Tensor, vocabulary: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of slots (sorted by teacher row) within the byte budget, cut where the teacher row changes.

    A chunk holds two fp32 [slots, vocabulary] tensors, p and q, and for a moment one of them in bf16.
    """
    budget = max(1, chunk_bytes // (BYTES_PER_LOGIT * vocabulary))
    stops = (torch.nonzero(rows.diff()).flatten() + 1).tolist()
    start = last = 0
    for stop in [*stops, len(rows)]:
        if stop - start > budget and last > start:
            yield start, last
            start = last
        last = stop
    if last > start:
        yield start, last


class _ChunkedTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, embedding, markov_w2, constants, bounds, terms):
        labels, weights, teacher, rows, heads = constants
        statistics = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=statistics, device=hidden.device)
        ce, tv = (torch.zeros(len(labels), dtype=statistics, device=hidden.device) for _ in range(2))
        accepted = torch.zeros(len(labels), dtype=torch.bool, device=hidden.device)
        train = any(ctx.needs_input_grad[:3])
        grads = [torch.zeros_like(x) for x in (hidden, embedding, markov_w2)] if train else []
        dtype = heads.draft.dtype
        hidden, embedding, markov_w2 = (x.to(dtype) for x in (hidden, embedding, markov_w2))
        for start, stop in bounds:
            part = slice(start, stop)
            first = int(rows[start])
            q, best = _teacher(heads, teacher[first : int(rows[stop - 1]) + 1], rows[part] - first, statistics)
            z = (hidden[part] @ heads.draft.mT).addmm_(embedding[part], markov_w2.mT).to(statistics)
            peak, guess = z.max(-1)
            targets = {name: heads.index_of(tokens) for name, tokens in (("ce", labels[part]), ("ce_argmax", best))}
            values = {name: z.gather(-1, at[:, None]).squeeze(-1) for name, (at, _) in targets.items()}
            p = torch.softmax(z, -1, out=z)
            log_normaliser = peak - p.gather(-1, guess[:, None]).squeeze(-1).log()
            values = {name: (log_normaliser - values[name]) * can for name, (_, can) in targets.items()}
            excess = torch.sub(p, q, out=q).clamp_min_(0)
            values["tv"] = excess.sum(-1)
            values["l1"] = 2 * values["tv"]
            ce[part], tv[part] = values["ce"], values["tv"]
            accepted[part] = heads.token_ids(guess) == best
            weight = weights[part].to(statistics)
            total += sum(alpha * (weight * values[name]).sum() for name, alpha in terms.items())
            if train:
                gradient = _logit_gradient(p, excess, targets, terms, weight).to(dtype)
                grads[0][part] = gradient @ heads.draft
                grads[1][part] = gradient @ markov_w2
                _add_product(grads[2], gradient.mT, embedding[part])
                del gradient
            del q, z, p, excess  # before the next chunk's
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(ce, tv, accepted)
        return total, ce, tv, accepted

    @staticmethod
    def backward(ctx, upstream, *_):
        # In place, since the largest is a whole gradient of the vocabulary: this backward runs once.
        return *(gradient.mul_(upstream.to(gradient.dtype)) for gradient in ctx.saved_tensors), None, None, None


def _teacher(heads: Heads, states: Tensor, at: Tensor, statistics: torch.dtype) -> tuple[Tensor, Tensor]:
    """The teacher's distribution [S, Vd] and its argmax [S], of slots that states [R, H] teach; slot s has row at[s]."""
    q = heads.teacher_logits(states).to(statistics)
    best = q.max(-1).indices  # quicker than argmax on CPUs
    torch.softmax(q, -1, out=q)  # over all tokens, whatever the draft can say; as p, so that equal logits give equal bits
    return (q if heads.kept is None else q[:, heads.kept])[at], best[at]


def _logit_gradient(
    p: Tensor, excess: Tensor, targets: dict[str, tuple[Tensor, Tensor]], terms: dict[str, float], weight: Tensor
) -> Tensor:
    """weight * d terms / dz of each slot [S, Vd]; overwrites p and excess, max(p - q, 0). targets: entry of each slot's label, and
    whether there is one."""
    overlap = terms.get("tv", 0.0) + 2 * terms.get("l1", 0.0)
    entropies = {name: terms[name] * can.to(p.dtype) for name, (_, can) in targets.items() if name in terms}
    above = excess.gt_(0).mul_(p)
    shared = sum(entropies.values()) - overlap * above.sum(-1)
    gradient = p.mul_((weight * shared)[:, None]).addcmul_(above, (overlap * weight)[:, None])
    for name, coefficient in entropies.items():
        gradient.scatter_add_(-1, targets[name][0][:, None], -(weight * coefficient)[:, None])
    return gradient


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a tensor of that size in between where dtypes allow it."""
    total.addmm_(left, right) if total.dtype == left.dtype else total.add_(left @ right)
