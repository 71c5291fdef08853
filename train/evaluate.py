"""`python -m train.evaluate CONFIG --draft DIR`: how many tokens a verifier forward yields on held-out rollouts.

Three readings on the same prompts: the closed loop with the real verifier, the offline simulation, and the bigram baseline.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from datasets import load_from_disk

from configs.schema import Config, config_argument, parse
from extract.hf import HFVerifier
from train.bigram import bigram_accepted, bigram_counts, follower_table
from train.checkpoint import latest, load_draft
from train.decode import Decoded, speculate
from train.draft import Draft
from train.report import write_report
from train.simulate import accepted_everywhere, walk
from train.verifier import FrozenVerifier

TIE = 1e-3  # fp32 top-2 gap under which batch shape decides the argmax


def evaluate(config: Config, draft: Draft) -> dict:
    """Acceptance on `evaluate.rollouts`, as a JSON-ready record (see `_summary`)."""
    torch.set_num_threads(config.evaluate.threads)
    rollouts = read_rollouts(config.evaluate.rollouts, config.evaluate.max_tokens)
    verifier = HFVerifier(config.verifier.path, config.verifier.dtype, draft.spec.taps, config.verifier.trust_remote_code)
    frozen = FrozenVerifier.load(config.verifier.path, torch.float32, torch.device("cpu"), draft.kept)
    draft.eval()
    started, decoded = time.monotonic(), []
    for first in range(0, len(rollouts), config.evaluate.batch_size):
        part = rollouts[first : first + config.evaluate.batch_size]
        decoded += speculate(verifier, draft, frozen, [row["prompt_ids"] for row in part], config.evaluate.max_tokens)
        print(f"closed loop: {len(decoded)}/{len(rollouts)} prompts, {time.monotonic() - started:.0f} s", flush=True)
    dataset = load_from_disk(config.data.path).with_format("numpy")
    follower = follower_table(bigram_counts(dataset, draft.spec.vocab_size))
    prompts = []
    for row, result in zip(rollouts, decoded, strict=True):
        token_ids = row["prompt_ids"] + result.response_ids
        taps = verifier.prefill([token_ids])[0][:, :-1]
        simulated = walk(accepted_everywhere(draft, frozen, token_ids, len(row["prompt_ids"]), taps))
        baseline = walk(bigram_accepted(follower, result.response_ids, draft.spec.block_size))
        prompts.append(_prompt_record(row, result, simulated, baseline))
    return _summary(prompts, draft.spec.block_size)


def read_rollouts(path: Path, max_tokens: int) -> list[dict]:
    """Rollouts to compare with, responses cut at `max_tokens`. Raises ValueError naming file and line."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append({"id": row["id"], "prompt_ids": row["prompt_ids"], "response_ids": row["response_ids"][:max_tokens]})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a rollout ({type(error).__name__}: {error})") from None
    if not rows:
        raise ValueError(f"{path}: no rollouts")
    return rows


def tokens_per_forward(emitted: list[list[int]]) -> float:
    """Tokens after the first response token, over verifier forwards after the prefill, summed over prompts."""
    return sum(map(sum, emitted)) / max(1, sum(map(len, emitted)))


def _prompt_record(row: dict, result: Decoded, simulated: list[int], baseline: list[int]) -> dict:
    expected = row["response_ids"]
    at = next((i for i, (a, b) in enumerate(zip(expected, result.response_ids)) if a != b), None)
    if at is None and len(expected) != len(result.response_ids):
        at = min(len(expected), len(result.response_ids)) - 1
    return {
        "id": row["id"],
        "tokens": len(result.response_ids),
        "emitted": result.emitted,
        "accepted": result.accepted,
        "simulated": simulated,
        "bigram": baseline,
        "differs_at": at,
        "gap": None if at is None else result.gaps[at],
    }


def _summary(prompts: list[dict], block_size: int) -> dict:
    """Totals over prompts: tokens per forward by each reading, acceptance by position, histogram, losslessness."""
    accepted = [count for prompt in prompts for count in prompt["accepted"]]
    return {
        "tokens_per_forward": tokens_per_forward([prompt["emitted"] for prompt in prompts]),
        "simulated": tokens_per_forward([prompt["simulated"] for prompt in prompts]),
        "bigram": tokens_per_forward([prompt["bigram"] for prompt in prompts]),
        "forwards": len(accepted),
        "accepted_before_cut": sum(accepted) / max(1, len(accepted)),
        "accepted_by_position": [sum(count > slot for count in accepted) / max(1, len(accepted)) for slot in range(block_size)],
        "histogram": [accepted.count(length) for length in range(block_size + 1)],
        "identical": sum(prompt["differs_at"] is None for prompt in prompts),
        "near_ties": sum(prompt["differs_at"] is not None and prompt["gap"] < TIE for prompt in prompts),
        "wrong": sum(prompt["differs_at"] is not None and prompt["gap"] >= TIE for prompt in prompts),
        "simulation_agrees": sum(prompt["simulated"] == prompt["emitted"] for prompt in prompts),
        "prompts": prompts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="train.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    config_argument(parser)
    parser.add_argument("--draft", type=Path, metavar="DIR", help="a checkpoint (default: the run's latest)")
    parser.add_argument("--require", type=float, metavar="X", help="fail below X tokens per forward, or without beating the bigrams")
    args, config = parse(parser)
    folder = args.draft or latest(config.run_dir / "checkpoints")
    if folder is None:
        sys.exit(f"train.evaluate: {config.run_dir} has no checkpoint yet; name one with --draft")
    try:
        summary = evaluate(config, load_draft(folder))
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"train.evaluate: {error}")
    print(write_report(config.run_dir, folder, summary))
    if summary["wrong"]:
        sys.exit(f"train.evaluate: {summary['wrong']} prompts decode to other tokens than without the draft, and not by a near tie")
    if args.require and not summary["tokens_per_forward"] >= max(args.require, summary["bigram"]):
        sys.exit(f"train.evaluate: {summary['tokens_per_forward']:.3f} tokens per forward; {args.require} and the bigrams' were required")


if __name__ == "__main__":
    main()
