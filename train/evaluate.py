"""`python -m train.evaluate CONFIG [--draft DIR] [--reference DIR]`: how many tokens a verifier forward yields, and how sure that is.

Up to three readings of the same draft on the same prompts (`evaluate.sets`): the closed loop with the real verifier, the exact
simulation along its answers, and the counters of a served engine. A reference, another draft or the report.json of an earlier
evaluation, is compared in pairs. The report goes to the run's folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.command import PlainError, command
from configs.load import parse
from configs.schema import Config
from extract.hf import HFVerifier
from extract.obtain import StateSource
from extract.pool import Pool
from extract.render import load_tokenizer
from store.contract import StateContract
from store.dataset import Dataset
from train.bigram import bigram_accepted, bigram_counts, follower_table
from train.checkpoint import latest, load_draft, read_record
from train.confidence import calibration
from train.counters import ask_engine
from train.decode import Decoded, Sampler, speculate
from train.diagnose import diagnose
from train.draft import Draft
from train.protocol import differences, protocol
from train.report import write_report
from train.sets import Question, answer_all, read_sets
from train.simulate import Response, expected_walk, simulate, walk
from train.statistics import compare, estimate, looped, summarise, walked
from train.verifier import FrozenVerifier

AGREE = 3.0  # standard errors within which two readings are the same


def evaluate(config: Config, folder: Path, reference: Path | None = None, diagnosed: bool = False) -> dict:
    """Acceptance on `evaluate.sets` as a JSON-ready record: statistics of each reading, pairs, calibration, protocol, warnings.

    folder: a checkpoint or an exported draft; reference: another one, or a report.json. Raises ValueError, FileNotFoundError.
    """
    settings = config.evaluate
    torch.set_num_threads(settings.threads)
    draft = load_draft(folder).eval()
    frozen = FrozenVerifier.load(config.verifier.path, torch.float32, torch.device("cpu"), draft.kept)
    tokenizer = load_tokenizer(config.verifier)
    questions = read_sets(settings.sets, settings.limit, settings.max_tokens)
    if diagnosed and "closed_loop" not in settings.readings:
        raise ValueError("--diagnose runs the verifier here: evaluate.readings must have closed_loop")
    report: dict = {"draft": str(folder), "block_size": draft.spec.block_size, "warnings": []}
    records: dict[str, list[dict]] = {}
    block = draft.spec.block_size

    asked, states = questions, StatesOf(config, folder)
    if "closed_loop" in settings.readings:
        sampler = Sampler(settings.rule, settings.temperature, torch.Generator().manual_seed(config.seed))
        verifier = states.verifier(draft.spec.taps)

        def decode(prompts: list[list[int]]) -> list[Decoded]:
            return speculate(verifier, draft, frozen, prompts, settings.max_tokens, sampler)

        decoded = answer_all("closed loop", questions, tokenizer, settings.batch_size, decode)
        records["closed_loop"] = [
            q.record | {"sums": looped(d.emitted, d.accepted, block, len(q.prompt_ids), q.turn)} for q, d in zip(questions, decoded)
        ]
        if settings.rule == "greedy":
            report |= _losslessness(questions, decoded, config.verifier.rounding)
        questions = [replace(question, response_ids=result.response_ids) for question, result in zip(questions, decoded)]
    elif missing := [question.id for question in questions if question.response_ids is None]:
        raise ValueError(f"{len(missing)} prompts have no answer ({missing[0]}, …): let extract.rollout answer them, or add closed_loop")

    responses = simulated(config, draft, frozen, questions, states)
    records["simulation"] = _walked(questions, responses)
    if decoded_at := records.get("closed_loop"):
        same = [walk(response.survival) == result.emitted for response, result in zip(responses, decoded)]
        report["agreement"] = _agreement(decoded_at, records["simulation"], sum(same) if settings.rule == "greedy" else None)
    if (config.data.path / "state.json").exists():
        records["bigrams"] = _bigrams(config, draft, questions)
    if settings.engine:
        records["engine"] = ask_engine(config, read_sets(settings.sets, settings.limit, settings.max_tokens), tokenizer, block)
        report["engine_agreement"] = _engine_agreement(records, config)
    report |= {"readings": {name: summarise(rows, block) for name, rows in records.items()}, "records": records}
    report["main"] = next(iter(records))
    if diagnosed:
        told = [question if question.response_ids else answered for question, answered in zip(asked, questions)]
        report["diagnosis"] = diagnose(config, draft, told)
    report["calibration"] = calibration(responses)
    report["protocol"] = protocol(config, draft.spec, questions, tokenizer)
    if reference:
        theirs = _reference(config, reference, questions, states, frozen, report)
        report["pairs"] = compare(records["simulation"], theirs) | {"reference": str(reference)}
        report["reference_positions"] = summarise(theirs, block)["unconditional"]
    return report


class StatesOf:
    """Where a text's states come from: the verifier in this process, or, without a closed loop, the durable cache and the run's
    extractor."""

    def __init__(self, config: Config, folder: Path):
        self.config, self.folder, self.verifiers, self.source = config, folder, {}, None

    def verifier(self, taps: tuple[int, ...]) -> HFVerifier:
        if taps not in self.verifiers:
            verifier = self.config.verifier
            self.verifiers[taps] = HFVerifier(verifier.path, verifier.dtype, taps, verifier.trust_remote_code)
        return self.verifiers[taps]

    def __call__(self, token_ids: list[int], taps: tuple[int, ...]) -> Tensor:
        """[T, m + 1, H]. Raises ValueError, NoStates: they cannot be had."""
        if "closed_loop" in self.config.evaluate.readings:
            return self.verifier(taps).prefill([token_ids])[0]
        if self.source is None:
            self.source = StateSource(self.config, Pool(self.config), keep=self.config.store.keep)
            self.source.contract = StateContract.model_validate(read_record(self.folder)["states"])
        contract = self.source.contract
        if taps != contract.taps:
            raise ValueError(f"the stored states have taps {contract.taps}, a draft wants {taps}")
        out = self.source.buffer(len(token_ids))
        if not self.source.obtain(token_ids, out):
            raise ValueError(f"an answer of {len(token_ids)} tokens has no states: {dict(self.source.drops)}")
        return out


def simulated(config: Config, draft: Draft, frozen: FrozenVerifier, questions: list[Question], states: StatesOf) -> list[Response]:
    """What the draft would have done along each answer."""
    settings, responses = config.evaluate, []
    for question in questions:
        text = question.prompt_ids + question.response_ids
        here = states(text, draft.spec.taps)
        responses += simulate(draft, frozen, text, [(len(question.prompt_ids), len(text))], here, settings.rule, settings.temperature)
    return responses


def _walked(questions: list[Question], responses: list[Response]) -> list[dict]:
    return [
        q.record | {"sums": walked(expected_walk(r.survival), r.survival, len(q.prompt_ids), q.turn)} for q, r in zip(questions, responses)
    ]


def _bigrams(config: Config, draft: Draft, questions: list[Question]) -> list[dict]:
    follower = follower_table(bigram_counts(Dataset(config.data.path), draft.spec.vocab_size))
    slots, responses = np.arange(draft.spec.block_size), []
    for question in questions:
        counts = np.array(bigram_accepted(follower, question.response_ids, draft.spec.block_size), int)
        responses.append(Response((slots < counts[:, None]).astype(float), np.zeros(0), np.zeros(0)))
    return _walked(questions, responses)


def _reference(config, reference: Path, questions, states, frozen: FrozenVerifier, report: dict) -> list[dict]:
    """Records of the reference on these answers; of a report.json its own, with a warning for every difference of protocol."""
    if reference.suffix == ".json":
        theirs = json.loads(reference.read_text())
        report["warnings"] += [f"not like for like: {text}" for text in differences(report["protocol"], theirs["protocol"])]
        return theirs["records"]["simulation"]
    other = load_draft(reference).eval()
    heads = replace(frozen.heads, kept=other.kept)
    if other.spec.block_size != report["block_size"]:
        report["warnings"].append(f"not like for like: {report['block_size']} drafts a forward here, {other.spec.block_size} there")
    return _walked(questions, simulated(config, other, replace(frozen, heads=heads), questions, states))


def _losslessness(questions: list[Question], decoded: list[Decoded], rounding: float) -> dict:
    """Answers with the draft against those without, where rollouts have them: identical, first different at a near tie, or wrong."""
    verdicts = []
    for expected, result in ((question.response_ids, result) for question, result in zip(questions, decoded) if question.response_ids):
        at = next((i for i, (a, b) in enumerate(zip(expected, result.response_ids)) if a != b), None)
        if at is None and len(expected) != len(result.response_ids):
            at = min(len(expected), len(result.response_ids)) - 1
        verdicts.append("identical" if at is None else "near_ties" if result.gaps[at] < rounding else "wrong")
    return {name: verdicts.count(name) for name in ("identical", "near_ties", "wrong")} | {"rounding": rounding}


def _agreement(loop: list[dict], simulation: list[dict], identical: int | None) -> dict:
    """Forwards of the loop against their expectation given the same answers; greedy draws nothing, so every walk is the same."""
    excess = sum(a["sums"]["forwards"] - b["sums"]["forwards"] for a, b in zip(loop, simulation))
    error = sum(b["sums"]["variance"] for b in simulation) ** 0.5
    agree = identical == len(loop) if identical is not None else abs(excess) <= AGREE * error
    return {"excess_forwards": excess, "standard_error": error, "identical": identical, "answers": len(loop), "agree": agree}


def _engine_agreement(records: dict[str, list[dict]], config: Config) -> dict:
    """The engine's counters against the closed loop, else the simulation: greedy in forwards, up to each answer's last block; drawn
    answers are others, so in tokens per forward within the error of both."""
    ours, theirs = records.get("closed_loop", records["simulation"]), records["engine"]
    forwards = [sum(record["sums"]["forwards"] for record in rows) for rows in (theirs, ours)]
    if config.evaluate.rule == "greedy":
        return {"forwards": forwards, "agree": abs(forwards[0] - forwards[1]) <= len(ours), "answers": len(ours)}
    values, errors = zip(*(estimate(rows) for rows in (theirs, ours)))
    error = float(np.hypot(*errors))
    agree = abs(values[0] - values[1]) <= AGREE * error
    return {"forwards": forwards, "tokens_per_forward": values, "standard_error": error, "agree": agree, "answers": len(ours)}


@command("train.evaluate", ValueError)
def main() -> None:
    parser = argparse.ArgumentParser(prog="train.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, metavar="DIR", help="a checkpoint or an exported draft (default: the run's latest)")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="another draft, or a report.json, to compare with in pairs")
    parser.add_argument("--diagnose", action="store_true", help="find out why acceptance is low")
    parser.add_argument("--require", type=float, metavar="X", help="fail below X tokens per forward, or without beating the bigrams")
    args, config = parse(parser)
    folder = args.draft or latest(config.run_dir / "checkpoints")
    if folder is None:
        raise PlainError(f"{config.run_dir} has no checkpoint yet; name one with --draft")
    report = evaluate(config, folder, args.reference, args.diagnose)
    print(write_report(config.run_dir, report))
    for warning in report["warnings"]:
        print(f"train.evaluate: {warning}", file=sys.stderr)
    if report.get("wrong"):
        raise PlainError(f"{report['wrong']} prompts decode to other tokens than without the draft, and not by a near tie")
    reached, bigrams = (
        report["readings"].get(name, {}).get("tokens_per_forward", {}).get("value", 0) for name in (report["main"], "bigrams")
    )
    if args.require and not (reached or 0) >= max(args.require, bigrams or 0):
        raise PlainError(f"{reached:.3f} tokens per forward; {args.require} and the bigrams' were required")


if __name__ == "__main__":
    sys.exit(main())
