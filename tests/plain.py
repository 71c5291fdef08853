"""The vocabulary terms as their definitions read, with every [slots, vocabulary] tensor in autograd's graph."""

from __future__ import annotations

from torch import Tensor


def plain_terms(hidden: Tensor, w1: Tensor, w2: Tensor, head: Tensor, teacher: Tensor, rows: Tensor, previous: Tensor, labels: Tensor):
    """Per slot [S]: {"ce", "ce_argmax", "tv", "l1"}. hidden [S, H], w1 and w2 [V, r], head [V, H], teacher [R, H], rows [S]."""
    p, q = (hidden @ head.mT + w1[previous] @ w2.mT).softmax(-1), (teacher @ head.mT).softmax(-1)[rows]
    ce = -p.gather(-1, labels[:, None]).log().squeeze(-1)
    ce_argmax = -p.gather(-1, q.argmax(-1, keepdim=True)).log().squeeze(-1)
    return {"ce": ce, "ce_argmax": ce_argmax, "tv": 1 - p.minimum(q).sum(-1), "l1": (p - q).abs().sum(-1)}
