"""Does a running engine make of an exported draft what our own closed loop makes of it?"""

from __future__ import annotations

import torch

from configs.schema import Config
from extract.hf import HFVerifier
from extract.render import load_tokenizer
from train.counters import ask_engine
from train.decode import Decoded, speculate
from train.draft import Draft
from train.formats import FormatError
from train.sets import answer_all, read_sets
from train.verifier import FrozenVerifier

DRIFT = 0.03  # of accepted drafts: an engine rounds otherwise, and near ties fall the other way


def check_engine(url: str, draft: Draft, config: Config) -> str:
    """Have the engine at `url`, which serves the draft and nobody else meanwhile, answer `evaluate.sets` greedily, and compare its
    counters with the closed loop's. Raises FormatError where they differ by more than rounding; EngineError, ValueError."""
    settings = config.evaluate.model_copy(update={"engine": url, "rule": "greedy", "concurrency": 1})
    config, block = config.model_copy(update={"evaluate": settings}), draft.spec.block_size
    tokenizer, verifier = load_tokenizer(config.verifier), config.verifier
    frozen = FrozenVerifier.load(verifier.path, torch.float32, torch.device("cpu"), draft.kept)
    model = HFVerifier(verifier.path, verifier.dtype, draft.spec.taps, verifier.trust_remote_code)

    def decode(prompts: list[list[int]]) -> list[Decoded]:
        return speculate(model, draft, frozen, prompts, settings.max_tokens)

    questions = read_sets(settings.sets, settings.limit, settings.max_tokens)
    decoded = answer_all("closed loop", questions, tokenizer, settings.batch_size, decode)
    accepted = [count for result in decoded for count in result.accepted]
    ours = [len(accepted), *(sum(count > slot for count in accepted) for slot in range(block))]
    records = ask_engine(config, read_sets(settings.sets, settings.limit, settings.max_tokens), tokenizer, block)
    names = "forwards", *(f"at_least/{k}" for k in range(1, block + 1))
    theirs = [int(sum(record["sums"][name] for record in records)) for name in names]
    line = f"drafts, and accepted by position: {theirs} in the engine, {ours} in the closed loop ({len(questions)} prompts)"
    rates = [sum(counts[1:]) / max(1, counts[0]) for counts in (ours, theirs)]
    if theirs[0] == 0 or abs(rates[0] - rates[1]) > DRIFT * rates[0]:
        raise FormatError(f"{url}: {line}")
    return line
