"""Standalone extraction: the states of a whole data set into the durable cache, with no trainer.

`python -m extract.capture CONFIG [--data DIR] [--shard i/n]`, with an extractor running (`python -m slurm.launch CONFIG --
python -m extract.capture CONFIG` starts one). What the cache has already is not made again, so a capture that was stopped goes
on where it was. DIR/captured.json says what the states are and holds greedy answers of the engine, whose states are in the
cache too: a training run with `store.keep` then needs no extractor, and still proves that the states are what they claim.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from configs.command import command
from configs.load import parse
from configs.schema import Config
from extract.command import Progress, in_threads, shard
from extract.obtain import StateSource
from extract.pool import Pool
from store.contract import ContractMismatch, StateContract, require_same
from store.dataset import Dataset
from store.files import write

RECORD = "captured.json"  # beside the data set
GREEDY = 64  # tokens that a handshake wants


class Captured(BaseModel):
    """What the states are, and greedy answers of the engine that made them: (prompt, response) as token ids, whose states (of
    both together) are in the cache too."""

    contract: StateContract
    examples: list[tuple[list[int], list[int]]]


def capture(config: Config, folder: Path, shard: int = 0, shards: int = 1) -> str:
    """Capture every `shards`-th row from `shard` on; a line with bytes and tokens a second.

    Raises ContractMismatch, ExtractionError, NoStates, StoreError, VerifierError, and ValueError where the cache is too small.
    """
    if config.store.cache_path is None:
        raise ValueError("store.cache_path: where shall the states go?")
    dataset = Dataset(folder)
    source = StateSource(config, Pool(config), world=shards, keep=True)
    try:
        source.contract = source.pool.contract()
        if source.contract.taps != config.draft.taps:
            raise ContractMismatch(f"taps: {source.contract.taps} in the engine, {config.draft.taps} in the recipe (draft.taps)")
        _require_room(config, dataset, source.buffer(1).nbytes)
        _record(config, source, dataset, folder / RECORD)
        return _capture(source, dataset, range(shard, len(dataset), shards), config.pool.in_flight)
    finally:
        source.close()


def _capture(source: StateSource, dataset: Dataset, rows: range, at_once: int) -> str:
    def take(row: int) -> Iterator[tuple[str, int]]:
        token_ids = dataset[row]["input_ids"].tolist()
        yield _take(source, token_ids), len(token_ids)

    def amount() -> str:
        return f"{tokens * token_bytes / 1e9:.3f} GB, {tokens:,} tokens, {tokens / progress.seconds():,.0f} tok/s"

    progress, token_bytes = Progress(), source.buffer(1).nbytes
    counts, tokens = Counter[str](), 0  # rows by outcome, tokens captured
    for outcome, length in in_threads(take, rows, at_once):
        counts[outcome] += 1
        tokens += length if outcome == "captured" else 0
        done = counts["captured"] + counts["dropped"]
        progress.tell(f"{counts.total():,} of {len(rows):,} rows, {amount()}", done / max(1, len(rows) - counts["there"]))
    others = {"were there": counts["there"], **{f"dropped: {cause}": count for cause, count in source.drops.items()}}
    more = "".join(f", {count:,} {what}" for what, count in others.items() if count)
    return f"{counts['captured']:,} rows captured{more}; {amount()}"


def _take(source: StateSource, token_ids: list[int]) -> str:
    """Have the states in the cache: "there" already, "captured" now, or "dropped" since they cannot be made."""
    if source.has(token_ids):
        return "there"
    return "captured" if source.obtain(token_ids, source.buffer(len(token_ids))) else "dropped"


def _require_room(config: Config, dataset: Dataset, token_bytes: int) -> None:
    """Raises ValueError where the first rows would be thrown out before the last ones are made."""
    tokens = dataset.tokens()
    if (needed := tokens * token_bytes) > config.store.cache_bytes:
        raise ValueError(f"store.cache_bytes: {config.store.cache_bytes:,}, but the states of {tokens:,} tokens take {needed:,}")


def _record(config: Config, source: StateSource, dataset: Dataset, file: Path) -> None:
    """Write what a training run needs to know, or see that it is the same as before. Raises ContractMismatch."""
    if file.exists():
        return require_same(source.contract, Captured.model_validate_json(file.read_text()).contract, f"{file} was captured otherwise")
    examples, known = [], 0
    for row in dataset:
        prompt = row["input_ids"][: max(1, int(row["loss_mask"].argmax()))].tolist()
        if len(prompt) + GREEDY >= config.extract.max_model_len:
            continue
        response, _ = source.pool.complete(prompt, GREEDY)
        if _take(source, [*prompt, *response]) != "dropped":
            examples.append((prompt, response))
            known += len(response)
        if known >= GREEDY:
            break
    write(file, Captured(contract=source.contract, examples=examples).model_dump_json(indent=2))


@command("extract.capture", ValueError)
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="extract.capture", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="data set of extract.prepare_data (default: data.path)")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="i/n", help="only every n-th row, from row i on")
    args, config = parse(parser, argv)
    print(capture(config, args.data or config.data.path, *args.shard))


if __name__ == "__main__":
    sys.exit(main())
