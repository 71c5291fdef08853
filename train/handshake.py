"""Before training starts: is the running extractor the verifier that the recipe means, and are its states what they claim?

A wrong tap, a missing norm or a shifted last layer trains without complaint and loses acceptance, so all are proven here.
"""

from __future__ import annotations

import uuid

import torch
from torch import Tensor

from configs.schema import Config
from extract.pool import Pool
from store.contract import ContractMismatch, StateContract
from store.objects import ObjectStore, run_prefix
from store.sample import discard, fetch
from store.verifier import fingerprint
from train.verifier import FrozenVerifier

TOKENS, REPRODUCED = 64, 62  # greedy tokens of the engine, and how many of them its own last states must reproduce
MARGIN = {"float32": 1e-3, "bfloat16": 0.25}  # closer than this, argmax is a matter of rounding (verifier.margin)


def handshake(config: Config, pool: Pool, store: ObjectStore, frozen: FrozenVerifier, prompts: list[list[int]]) -> StateContract:
    """Returns the engine's state contract once it has passed. prompts: token ids to continue, as many as it takes.

    Raises ContractMismatch: other taps, another verifier, a wrong norm flag, a last state that is not the last layer's.
    """
    contract = pool.contract()
    if contract.taps != config.draft.taps:
        raise ContractMismatch(f"taps: {contract.taps} in the engine, {config.draft.taps} in the recipe (draft.taps)")
    if (ours := fingerprint(config.verifier.path)) != contract.verifier:
        raise ContractMismatch(f"another verifier: the engine serves {contract.verifier}, {config.verifier.path} is {ours}")
    frozen.last = contract.last
    last, tokens = _greedy(run_prefix(config.run_dir), pool, store, contract, prompts, frozen.embedding.shape[1])
    margin = MARGIN[contract.dtype] if config.verifier.margin is None else config.verifier.margin
    missed, judged = _missed(frozen.logits(last), tokens, margin)
    if missed > TOKENS - REPRODUCED:
        raise ContractMismatch(_diagnose(frozen, last, tokens, margin, f"{missed} of {judged} greedy tokens are not reproduced"))
    if judged < TOKENS // 4:
        raise ContractMismatch(f"{judged} of {len(tokens)} greedy tokens have a top-2 margin over {margin}: too few to prove anything")
    return contract


def _greedy(run: str, pool: Pool, store: ObjectStore, contract: StateContract, prompts, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Last states [n, H] that should predict the engine's own greedy tokens [n], n >= TOKENS unless prompts run out."""
    states, tokens = [], []
    for prompt in prompts:
        response, _ = pool.complete(prompt, max_tokens=TOKENS)
        token_ids = [*prompt, *response]
        out = torch.empty((len(token_ids), len(contract.taps) + 1, hidden_size), dtype=getattr(torch, contract.dtype))
        name = f"{run}{uuid.uuid4().hex[:8]}/handshake/0/0"
        try:
            pool.make(name, token_ids)
            fetch(store, name, contract, token_ids, out)
        finally:
            discard(store, name)
        states.append(out[len(prompt) - 1 : -1, -1])
        tokens += response
        if len(tokens) >= TOKENS:
            break
    return torch.cat(states), torch.tensor(tokens)


def _missed(logits: Tensor, tokens: Tensor, margin: float) -> tuple[int, int]:
    """How many tokens with a clear top-2 margin are not the argmax, and how many have one."""
    top, best = logits.float().topk(2, -1)
    clear = top[:, 0] - top[:, 1] >= margin
    return int((clear & (best[:, 0] != tokens.to(best.device))).sum()), int(clear.sum())


def _diagnose(frozen: FrozenVerifier, last: Tensor, tokens: Tensor, margin: float, symptom: str) -> str:
    """Which mistake it is: the other norm flag reproduces the tokens, or nothing does."""
    claimed = frozen.last
    frozen.last = "post_norm" if claimed == "pre_norm" else "pre_norm"
    missed, _ = _missed(frozen.logits(last), tokens, margin)
    if missed <= TOKENS - REPRODUCED:
        return f"wrong norm flag: the engine says its last state is {claimed}, but it is {frozen.last} ({symptom})"
    return f"wrong last layer: the last state is not the output of the verifier's last layer, before or after its norm ({symptom})"
