"""Before training starts: is the running extractor the verifier that the recipe means, and are its states what they claim?

A wrong tap, a missing norm or a shifted last layer trains without complaint and loses acceptance, so all are proven here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from configs.schema import Config
from extract.capture import Captured
from extract.obtain import StateSource
from store.contract import ContractMismatch, StateContract
from store.verifier import fingerprint
from train.verifier import FrozenVerifier

TOKENS, REPRODUCED = 64, 62  # greedy tokens of the engine, and how many of them its own last states must reproduce


Example = tuple[list[int], list[int], Tensor]  # prompt, the engine's greedy response, states [T, m + 1, H] of both together


def handshake(config: Config, contract: StateContract, frozen: FrozenVerifier, examples: Iterable[Example]) -> None:
    """Returns when the states are what the contract claims, and both are what the recipe means.

    Raises ContractMismatch: other taps, another verifier, a wrong norm flag, a last state that is not the last layer's.
    """
    if contract.taps != config.draft.taps:
        raise ContractMismatch(f"taps: {contract.taps} in the engine, {config.draft.taps} in the recipe (draft.taps)")
    if (ours := fingerprint(config.verifier.path)) != contract.verifier:
        raise ContractMismatch(f"another verifier: the engine serves {contract.verifier}, {config.verifier.path} is {ours}")
    frozen.last = contract.last
    last, tokens = _enough(examples)
    margin = config.verifier.rounding
    missed, judged = _missed(frozen.logits(last), tokens, margin)
    if missed > TOKENS - REPRODUCED:
        raise ContractMismatch(_diagnose(frozen, last, tokens, margin, f"{missed} of {judged} greedy tokens are not reproduced"))
    if judged < TOKENS // 4:
        raise ContractMismatch(f"{judged} of {len(tokens)} greedy tokens have a top-2 margin over {margin}: too few to prove anything")


def from_engine(source: StateSource, prompts: Iterable[list[int]]) -> Iterator[Example]:
    """What the running extractor answers and makes now; the durable cache would prove an engine of another day."""
    for prompt in prompts:
        response, _ = source.pool.complete(prompt, max_tokens=TOKENS)
        states = source.buffer(len(prompt) + len(response))
        source.make([*prompt, *response], states)
        yield prompt, response, states


def from_cache(source: StateSource, captured: Captured) -> Iterator[Example]:
    """What the engine answered and made when the data set was captured. Raises ContractMismatch: it is not in the cache."""
    for prompt, response in captured.examples:
        states = source.buffer(len(prompt) + len(response))
        if not source.cache.get_into(captured.contract, [*prompt, *response], states):
            raise ContractMismatch("the states that were captured are not in the durable cache (store.cache_path)")
        yield prompt, response, states


def _enough(examples: Iterable[Example]) -> tuple[Tensor, Tensor]:
    """Last states [n, H] that should predict the engine's own greedy tokens [n], n >= TOKENS unless examples run out."""
    states, tokens = [], []
    for prompt, response, made in examples:
        states.append(made[len(prompt) - 1 : -1, -1])
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
