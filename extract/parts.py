"""Chunks of rows become parts, files of token ids and masks: made by any number of processes, the same whoever makes them.

A part lies in the work folder under its number and the digest of what it was made from, so a run that was killed goes on with
the parts that are there, and several machines can share the work.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Encoding

from configs.schema import Config
from extract.conversations import Dropped, Rollout, read_row
from extract.render import RenderError, load_tokenizer, prompt_ids, stop_ids
from extract.rows import Chunk, DataError, Source, chunks
from extract.supervise import Rendered, Supervisor
from store.files import appearing
from store.verifier import text_config

BATCH = 64  # rows encoded together
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("row", pa.int64()),  # its number in the source
        ("content", pa.binary(16)),  # hash of ids and mask
        ("prompt", pa.uint64()),  # hash of the ids before the first answer
    ]
)


@dataclass(frozen=True)
class Part:
    """A file of kept rows; what else became of its chunk stands in the metadata of its schema (`read`)."""

    path: Path
    source: int  # index in the sources of the run

    def read(self) -> tuple[pa.Table, dict]:
        """Rows, and {"rows": of the chunk, "cut": rows cut to length, "finished": {reason: rollouts}, "drops": [[row, cause, detail]]}."""
        table = pa.ipc.open_stream(pa.memory_map(str(self.path))).read_all()
        return table, json.loads(table.schema.metadata[b"chunk"])


@dataclass(frozen=True)
class Made:
    """A row that is kept: ids int32 [T], mask uint8 [T]; `finish_reason` of a rollout, "" of a conversation.

    prompt: what the first answer of the conversation was given, by which rows are held out together.
    """

    ids: np.ndarray
    mask: np.ndarray
    prompt: np.ndarray
    finish_reason: str
    cut: bool


class Maker:
    """One process's tokenizer and what it makes of rows. Raises RenderError, VerifierError as `load_tokenizer` does."""

    def __init__(self, config: Config):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share the cores, not threads; threads and forks deadlock
        self.data, self.seed = config.data, str(config.seed).encode()
        self.tokenizer = load_tokenizer(config.verifier)
        self.supervisor = Supervisor(self.tokenizer, stop_ids(config.verifier, self.tokenizer), config.data.turns)
        self.vocab_size = text_config(config.verifier.path).get("vocab_size", len(self.tokenizer))

    def rows(self, rows: list[object]) -> list[Made | Dropped]:
        """What becomes of each row; step by step for all of them, since that is kinder to caches than row by row."""
        items = [_attempt(self._read, row) for row in rows]
        encodings = iter(self.supervisor.encode([item.text for item in items if isinstance(item, Rendered)]))
        return [_attempt(self._make, item, next(encodings) if isinstance(item, Rendered) else None) for item in items]

    def _read(self, row: object) -> Rendered | Rollout:
        item = read_row(row)
        return item if isinstance(item, Rollout) else self.supervisor.render(item)

    def _make(self, item: Rendered | Rollout, encoding: Encoding | None) -> Made:
        if isinstance(item, Rollout):
            ids = np.array(item.prompt_ids + item.response_ids)
            if ids.max() >= self.vocab_size:
                raise Dropped("bad_ids", f"token {ids.max()}, the verifier has {self.vocab_size}")
            ids, mask = ids.astype(np.int32), (np.arange(len(ids)) >= len(item.prompt_ids)).astype(np.uint8)
        else:
            ids, mask = self.supervisor.supervise(item, encoding, self.data.length)
        end = fitting(mask, self.data.length, self.data.cut)
        supervised = int(mask[:end].sum())
        if supervised < self.data.min_supervised:
            raise Dropped("few_supervised", f"{supervised} tokens, data.min_supervised is {self.data.min_supervised}")
        reason = item.finish_reason if isinstance(item, Rollout) else ""
        return Made(ids[:end], mask[:end], self._prompt(item, ids, mask), reason, end < len(ids))

    def _prompt(self, item: Rendered | Rollout, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Ids of what the first answer was given; where later ones are supervised alone it is rendered again."""
        asked = item.asked if isinstance(item, Rollout) else None
        if isinstance(item, Rendered) and self.data.turns == "last":
            asked = list(takewhile(lambda message: message["role"] != "assistant", item.messages))
        try:
            return ids[: mask.argmax()] if asked is None else np.array(prompt_ids(self.tokenizer, asked), np.int32)
        except RenderError:
            return ids[: mask.argmax()]

    def part(self, chunk: Chunk, path: Path) -> None:
        """Write the part of a chunk, complete or not at all."""
        kept, drops, finished, rows, cut = [], [], Counter[str](), 0, 0
        read = chunk.parse()
        while batch := list(islice(read, BATCH)):
            rows += len(batch)
            for (number, row), made in zip(batch, self.rows([row for _, row in batch]), strict=True):
                if isinstance(made, Dropped):
                    drops.append([number, made.cause, made.detail[:200]])
                    continue
                cut += made.cut
                if made.finish_reason:
                    finished[made.finish_reason] += 1
                content = hashlib.blake2b(made.ids, digest_size=16, key=self.seed)
                content.update(made.mask)
                prompt = hashlib.blake2b(made.prompt, digest_size=8, key=self.seed)
                name = _identity(row) or f"{chunk.source.name}:{number}"
                hashes = {"content": content.digest(), "prompt": int.from_bytes(prompt.digest(), "little")}
                kept.append({"id": name, "input_ids": made.ids, "loss_mask": made.mask, "row": number, **hashes})
        about = {"rows": rows, "cut": cut, "finished": finished, "drops": drops}
        schema = SCHEMA.with_metadata({"chunk": json.dumps(about)})
        with appearing(path) as partial, pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            stream.write(pa.Table.from_pylist(kept, schema))


def _attempt(step: Callable, item: object, *more: object) -> object:
    """What `step` returns, or the drop that it raises; what is dropped already stays so."""
    try:
        return item if isinstance(item, Dropped) else step(item, *more)
    except Dropped as drop:
        return drop
    except Exception as error:  # one row costs one row; a fault of ours shows in the report under its own cause
        return Dropped("failed", f"{type(error).__name__}: {error}")


def fitting(mask: np.ndarray, length: int, cut: str) -> int:
    """How many tokens of a row are kept: all where they fit, else up to a supervised token (or a turn's end). Raises Dropped."""
    if len(mask) <= length:
        return len(mask)
    ends = np.flatnonzero(mask[:length] if cut == "token" else (mask[:length] == 1) & (mask[1 : length + 1] == 0)) + 1
    if not len(ends):
        raise Dropped("too_long", f"{len(mask)} tokens, and no {'answer' if cut == 'token' else 'turn'} ends within {length}")
    return int(ends[-1])


def make_parts(
    config: Config, maker: Maker, sources: list[Source], folder: Path, shard: tuple[int, int], progress: Callable[[int, int], None]
) -> list[Part]:
    """Make what is missing of shard i of n; all parts of the data in their order, made or not.

    `progress(rows, bytes)` is told of every finished chunk. Raises DataError.
    """
    index, total = shard
    parts: list[Part] = []

    def missing() -> Iterator[tuple[Chunk, Path]]:
        for at, source in enumerate(sources):
            for chunk in chunks(source):
                number, path = len(parts), folder / f"{len(parts):07d}-{chunk.digest()}.arrow"
                parts.append(Part(path, at))
                if number % total == index and not path.exists():
                    yield chunk, path
                else:
                    progress(chunk.size, chunk.nbytes)

    if config.data.processes == 1:
        for chunk, path in missing():
            maker.part(chunk, path)
            progress(chunk.size, chunk.nbytes)
    else:
        _in_processes(config, missing(), progress)
    return parts


def _in_processes(config: Config, work: Iterator[tuple[Chunk, Path]], progress: Callable[[int, int], None]) -> None:
    context = multiprocessing.get_context("forkserver")  # forks of a process without threads, that has imported all
    context.set_forkserver_preload(["extract.parts", "pandas"])  # pyarrow imports pandas on first use, for seconds
    pool = ProcessPoolExecutor(config.data.processes, context, _begin, (config,))
    running: dict[Future, Chunk] = {}
    try:
        for chunk, path in work:
            running[pool.submit(_work, chunk, path)] = chunk
            if len(running) >= 2 * config.data.processes:
                _collect(running, progress)
        while running:
            _collect(running, progress)
    except BrokenProcessPool:
        raise DataError("a process that tokenises has died (killed, or out of memory); run again to go on") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _collect(running: dict[Future, Chunk], progress: Callable[[int, int], None]) -> None:
    for done in wait(running, return_when=FIRST_COMPLETED).done:
        done.result()
        chunk = running.pop(done)
        progress(chunk.size, chunk.nbytes)


def _begin(config: Config) -> None:
    global _maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _maker = Maker(config)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(chunk: Chunk, path: Path) -> None:
    _maker.part(chunk, path)


def _identity(row: dict) -> str | None:
    """A row's own id as a text that Arrow can hold."""
    own = row.get("id")
    return str(own)[:200].encode("utf-8", "replace").decode() if isinstance(own, str | int) and own != "" else None
