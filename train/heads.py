"""Output heads of verifier and draft: one frozen matrix that both share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Heads:
    """The verifier's matrix [V, H], and how its logits leave it: times `scale`, then soft-capped at `softcap`.

    A draft's logits are plain products, since that is what engines compute; a scale of its own would only be absorbed by
    its final norm. `kept` [Vd] are the token ids, ascending, of a reduced draft vocabulary, whose head is those rows.
    """

    verifier: Tensor
    scale: float = 1.0
    softcap: float | None = None
    kept: Tensor | None = None
    draft: Tensor = field(init=False)

    def __post_init__(self):
        self.draft = self.verifier if self.kept is None else self.verifier[self.kept]

    def teacher_logits(self, normed: Tensor) -> Tensor:
        """Final-normed verifier states [..., H] → logits [..., V], fp32 at least."""
        logits = _product(normed, self.verifier)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Final-normed draft states [..., H] → logits [..., Vd] without the Markov bias, fp32 at least."""
        return _product(hidden, self.draft)

    def token_ids(self, index: Tensor) -> Tensor:
        """Entries of the draft vocabulary → the verifier's token ids."""
        return index if self.kept is None else self.kept[index]

    def spread(self, p: Tensor) -> Tensor:
        """A distribution [..., Vd] over the draft vocabulary → the same over the verifier's [..., V]."""
        return p if self.kept is None else p.new_zeros(*p.shape[:-1], self.verifier.shape[0]).index_copy_(-1, self.kept, p)

    def index_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids → entries of the draft vocabulary, and whether it has them (an entry that it lacks is arbitrary)."""
        if self.kept is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        index = torch.searchsorted(self.kept, tokens).clamp_max(len(self.kept) - 1)
        return index, self.kept[index] == tokens


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    logits = x.to(matrix.dtype) @ matrix.mT
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
