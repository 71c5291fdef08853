"""Which drafts a verifier accepts, by the rule of the engine, and what each rule would have accepted along a text that is there.

greedy         temperature 0: a draft is accepted if it is the verifier's argmax
standard       drafts sampled from p, accepted with probability min(1, q / p), else a token from max(q - p, 0)
greedy_drafts  the draft's argmax, accepted with probability q, else a token from q without it
block          drafts sampled from p; the longest prefix that a joint test accepts (block verification)

q is the verifier's distribution, p the draft's, both at the temperature of the run; `greedy` takes logits as well.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DRAWN = ("standard", "block")  # rules whose drafts are sampled


def verify(rule: str, drafts: Tensor, p: Tensor | None, q: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Drafts accepted [R] and the verifier's own next token [R].

    drafts [R, B]; p [R, B, V] where drafts were sampled; q [R, B + 1, V], row k given the drafts before slot k.
    """
    block = drafts.shape[1]
    if rule == "greedy":
        best = q.argmax(-1)
        accepted = (drafts == best[:, :block]).cumprod(1).sum(1)
        return accepted, best.gather(1, accepted[:, None]).squeeze(1)
    if rule == "greedy_drafts":
        p = F.one_hot(drafts, q.shape[-1]).to(q.dtype)
    ratio = (q[:, :block].gather(2, drafts[..., None]) / p.gather(2, drafts[..., None])).squeeze(-1)
    draw = 1 - torch.rand(drafts.shape, generator=generator, dtype=q.dtype, device=q.device)  # in (0, 1]
    scale = torch.ones(len(q), block + 1, dtype=q.dtype, device=q.device)  # of q against p where the drafts end
    if rule == "block":
        for slot in range(block):
            scale[:, slot + 1] = (scale[:, slot] * ratio[:, slot]).clamp_max(1)
        left = (scale[:, 1:block, None] * q[:, 1:block] - p[:, 1:]).clamp_min(0).sum(-1)
        bound = torch.cat(((left / (left + 1 - scale[:, 1:block])).nan_to_num(0), scale[:, block:]), 1)
        accepted = ((draw <= bound) * torch.arange(1, block + 1, device=q.device)).amax(1)
    else:
        accepted = (draw <= ratio).cumprod(1).sum(1)
    row = torch.arange(len(q), device=q.device)
    drafted = F.pad(p, (0, 0, 0, 1))[row, accepted]  # nothing was drafted after a whole block
    rest = (scale[row, accepted, None] * q[row, accepted] - drafted).clamp_min(0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, q[row, accepted])  # p = q up to rounding
    return accepted, torch.multinomial(rest, 1, generator=generator).squeeze(1)


def survival(rule: str, hit: Tensor, p: Tensor | None = None, q: Tensor | None = None) -> Tensor:
    """P(at least k + 1 drafts are accepted | the text goes on as it does): [..., B].

    hit: the draft's argmax is the text's token; p and q: probability of that token, along the text. It is the draft over the
    verifier here, since the text is drawn from the verifier. Exact, as the joint law of accepted drafts and emitted tokens.
    """
    if rule in ("greedy", "greedy_drafts"):
        return hit.to(torch.float64).cumprod(-1)
    ratio = p.double() / q.double()
    return ratio.cumprod(-1).cummin(-1).values.clamp_max(1) if rule == "block" else ratio.clamp_max(1).cumprod(-1)
