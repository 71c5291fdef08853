"""Standalone extraction: the states of a whole data set into the durable cache, with no trainer.

`python -m extract.capture CONFIG [--data DIR] [--shard i/n]`, with an extractor running (`python -m slurm.launch CONFIG --
python -m extract.capture CONFIG` starts one). What the cache has already is not made again, so a capture that was stopped goes
on where it was. DIR/captured.json says what the states are and holds greedy answers of the engine, whose states are in the
cache too: a training run with `store.keep` then needs no extractor, and still proves that the states are what they claim.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path

from configs.command import command
from configs.load import parse
from configs.schema import Config
from extract.captured import RECORD, Captured
from extract.command import Progress, shard
from extract.obtain import StateSource
from extract.pool import Pool
from store.contract import ContractMismatch, require_same
from store.dataset import Dataset
from store.files import write

GREEDY = 64  # tokens that a handshake wants


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
    def take(row: int) -> tuple[int, bool | None]:
        token_ids = dataset[row]["input_ids"].tolist()
        return len(token_ids), _take(source, token_ids)

    waiting, pending = iter(rows), set[Future]()
    progress = Captures(len(rows), source.buffer(1).nbytes)
    with ThreadPoolExecutor(at_once, "capture") as askers:
        while True:
            pending |= {askers.submit(take, row) for row in islice(waiting, 2 * at_once - len(pending))}
            if not pending:
                return progress.summary(source.drops)
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                progress.add(*future.result())


def _take(source: StateSource, token_ids: list[int]) -> bool | None:
    """Whether the states could be made and lie in the cache now; None: they were there."""
    if source.has(token_ids):
        return None
    return source.obtain(token_ids, source.buffer(len(token_ids)))


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
        if _take(source, [*prompt, *response]) is not False:
            examples.append((prompt, response))
            known += len(response)
        if known >= GREEDY:
            break
    write(file, Captured(contract=source.contract, examples=examples).model_dump_json(indent=2))


class Captures(Progress):
    def __init__(self, rows: int, token_bytes: int):
        super().__init__()
        self.rows, self.token_bytes = rows, token_bytes
        self.made = self.there = self.dropped = self.tokens = 0

    def add(self, tokens: int, outcome: bool | None) -> None:
        """A row of so many tokens: made (True), not to be made (False), or there already (None)."""
        self.made += outcome is True
        self.there += outcome is None
        self.dropped += outcome is False
        self.tokens += tokens if outcome else 0
        if self.due():
            done = self.made + self.dropped
            left = (self.rows - done - self.there) * self.seconds() / max(done, 1)
            self.say(f"{done + self.there:,} of {self.rows:,} rows, {self._amount()}, {left:,.0f} s left", self.end)

    def summary(self, drops) -> str:
        counts = {"were there": self.there, **{f"dropped: {cause}": count for cause, count in drops.items()}}
        others = "".join(f", {count:,} {what}" for what, count in counts.items() if count)
        return f"{self.made:,} rows captured{others}; {self._amount()}"

    def _amount(self) -> str:
        return f"{self.tokens * self.token_bytes / 1e9:.3f} GB, {self.tokens:,} tokens, {self.tokens / self.seconds():,.0f} tok/s"


@command("extract.capture", ValueError)
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="extract.capture", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="data set of extract.prepare_data (default: data.path)")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="i/n", help="only every n-th row, from row i on")
    args, config = parse(parser, argv)
    print(capture(config, args.data or config.data.path, *args.shard))


if __name__ == "__main__":
    sys.exit(main())
