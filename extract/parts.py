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
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

import numpy as np
import pyarrow as pa

from configs.schema import Config
from extract.conversations import Dropped, Rollout, read_row
from extract.render import load_tokenizer, stop_ids
from extract.rows import Chunk, DataError, Source, chunks
from extract.supervise import Supervisor
from store.verifier import text_config

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


class Maker:
    """One process's tokenizer and what it makes of rows. Raises RenderError, VerifierError as `load_tokenizer` does."""

    def __init__(self, config: Config):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share the cores, not threads; threads and forks deadlock
        self.data, self.seed = config.data, str(config.seed).encode()
        self.tokenizer = load_tokenizer(config.verifier)
        self.supervisor = Supervisor(self.tokenizer, stop_ids(config.verifier, self.tokenizer), config.data.turns)
        self.vocab_size = text_config(config.verifier.path).get("vocab_size", len(self.tokenizer))

    def row(self, row: object) -> tuple[np.ndarray, np.ndarray, str, bool]:
        """ids int32 [T], mask uint8 [T], finish reason of a rollout ("" of a conversation), whether it was cut. Raises Dropped."""
        if isinstance(row, Dropped):
            raise row
        item = read_row(row)
        if isinstance(item, Rollout):
            ids = np.array(item.prompt_ids + item.response_ids)
            if ids.max() >= self.vocab_size:
                raise Dropped("bad_ids", f"token {ids.max()}, the verifier has {self.vocab_size}")
            ids, mask = ids.astype(np.int32), (np.arange(len(ids)) >= len(item.prompt_ids)).astype(np.uint8)
        else:
            ids, mask = self.supervisor.tokenise(item, self.data.length)
        end = fitting(mask, self.data.length, self.data.cut)
        supervised = int(mask[:end].sum())
        if supervised < self.data.min_supervised:
            raise Dropped("few_supervised", f"{supervised} tokens, data.min_supervised is {self.data.min_supervised}")
        return ids[:end], mask[:end], item.finish_reason if isinstance(item, Rollout) else "", end < len(ids)

    def part(self, chunk: Chunk, path: Path) -> int:
        """Write the part of a chunk, complete or not at all; the number of rows kept."""
        columns, drops, finished, rows, cut = [[] for _ in SCHEMA], [], {}, 0, 0
        for number, row in chunk.parse():
            rows += 1
            try:
                ids, mask, reason, shortened = self.row(row)
            except Dropped as drop:
                drops.append([number, drop.cause, drop.detail[:200]])
                continue
            except Exception as error:  # one row costs one row; a fault of ours shows in the report under its own cause
                drops.append([number, "failed", f"{type(error).__name__}: {error}"[:200]])
                continue
            cut += shortened
            if reason:
                finished[reason] = finished.get(reason, 0) + 1
            content = hashlib.blake2b(ids.tobytes() + mask.tobytes(), digest_size=16, key=self.seed)
            prompt = hashlib.blake2b(ids[: mask.argmax()].tobytes(), digest_size=8, key=self.seed)
            name = _identity(row) or f"{chunk.source.name}:{number}"
            values = (name, ids, mask, number, content.digest(), int.from_bytes(prompt.digest(), "little"))
            for column, value in zip(columns, values, strict=True):
                column.append(value)
        about = {"rows": rows, "cut": cut, "finished": finished, "drops": drops}
        schema = SCHEMA.with_metadata({"chunk": json.dumps(about)})
        arrays = [
            _lists(column, field.type) if pa.types.is_list(field.type) else pa.array(column, field.type)
            for column, field in zip(columns, SCHEMA)
        ]
        table = pa.table(arrays, schema=schema)
        partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            stream.write(table)
        os.replace(partial, path)
        return table.num_rows


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
        numbers = count()
        for source, chunk in chain.from_iterable(((at, chunk) for chunk in chunks(each)) for at, each in enumerate(sources)):
            number = next(numbers)
            path = folder / f"{number:07d}-{chunk.digest()}.arrow"
            parts.append(Part(path, source))
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
    _maker = Maker(config)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(chunk: Chunk, path: Path) -> int:
    return _maker.part(chunk, path)


def _lists(rows: list[np.ndarray], kind: pa.ListType) -> pa.ListArray:
    """Rows of numbers as a column, without a look at each number."""
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, np.concatenate(rows) if rows else pa.array([], kind.value_type), kind)


def _identity(row: dict) -> str | None:
    """A row's own id as a text that Arrow can hold."""
    own = row.get("id")
    return str(own)[:200].encode("utf-8", "replace").decode() if isinstance(own, str | int) and own != "" else None
