"""Data files as a stream of chunks of rows: JSON lines, JSON arrays, Parquet, data sets of the `datasets` library by folder or hub id.

Chunks are cut by the content alone, so the same files give the same chunks in every run; memory holds one chunk, whatever the size.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from configs.command import PlainError
from extract.conversations import Dropped

CHUNK_ROWS = 500
CHUNK_BYTES = 4 << 20
ROW_BYTES = 32 << 20  # a longer line is no conversation
LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?")


class DataError(PlainError):
    """A data set that cannot be made of what is there; the message is one line."""


@dataclass(frozen=True)
class Source:
    """One input. `weight`: how often a row of it is taken; 0.25 takes a quarter of its rows, 2 every row twice."""

    path: str
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Source:
        """From `PATH` or `PATH@WEIGHT`. Raises DataError."""
        path, at, weight = text.rpartition("@")
        if not at or Path(text).exists():
            path, weight = text, "1"
        if not re.fullmatch(r"\d+\.?\d*|\.\d+", weight):
            raise DataError(f"--data {text}: {weight!r} is not a weight, e.g. {path}@0.5")
        folder = path.partition(":")[0]
        if not Path(path).exists() and not Path(folder).is_dir() and (not HUB_ID.fullmatch(path) or path.endswith((*LINES, ".parquet"))):
            hint = " (overrides go before --data)" if "=" in path else ""
            raise DataError(f"--data {path}: no such file or folder{hint}")
        return cls(path, float(weight))

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def nbytes(self) -> int | None:
        """Size of a file; None where it is not one file."""
        return Path(self.path).stat().st_size if Path(self.path).is_file() else None


@dataclass(frozen=True)
class Chunk:
    """Some rows of a source as they were read: JSON texts, or an Arrow stream.

    first: number of the first row, from 1; size: number of rows (lines, blank ones too).
    """

    source: Source
    first: int
    size: int
    rows: list[bytes] | bytes

    @property
    def nbytes(self) -> int:
        return len(self.rows) if isinstance(self.rows, bytes) else sum(map(len, self.rows))

    def digest(self) -> str:
        """16 hex digits of what was read and where, so that a part made of it is known again."""
        digest = hashlib.blake2b(f"{self.source.path}:{self.first}".encode(), digest_size=8)
        for row in [self.rows] if isinstance(self.rows, bytes) else self.rows:
            digest.update(len(row).to_bytes(8, "little") + row)
        return digest.hexdigest()

    def parse(self) -> Iterator[tuple[int, object]]:
        """(row number, row); what is not a row at all is a Dropped."""
        if isinstance(self.rows, bytes):
            table = pa.ipc.open_stream(self.rows).read_all()
            yield from enumerate(map(_without_none, table.to_pylist()), self.first)
        else:
            for number, text in enumerate(self.rows, self.first):
                if text.strip():
                    yield number, _from_json(text)


def chunks(source: Source) -> Iterator[Chunk]:
    """All rows of a source. Raises DataError: not there, unreadable, of an unknown kind."""
    path = Path(source.path)
    if path.is_file() and path.suffix != ".parquet":
        if not path.name.endswith(LINES):
            raise DataError(f"--data {path}: of no known kind (valid: {', '.join(LINES)}, .parquet, a folder or hub id of a data set)")
        yield from _pack(source, _texts(path))
        return
    first = 1
    for table in _parquet(path) if path.is_file() else _data_set(source.path):
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write(table)
        yield Chunk(source, first, table.num_rows, sink.getvalue())
        first += table.num_rows


def _pack(source: Source, texts: Iterable[bytes]) -> Iterator[Chunk]:
    rows, size, first = [], 0, 1
    for text in texts:
        rows.append(text)
        size += len(text)
        if len(rows) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(source, first, len(rows), rows)
            rows, size, first = [], 0, first + len(rows)
    if rows:
        yield Chunk(source, first, len(rows), rows)


def _texts(path: Path) -> Iterator[bytes]:
    """The lines of a file, or the elements of its one array. Compressed files are read as they are."""
    try:
        with pa.input_stream(str(path), compression="detect") as raw, io.BufferedReader(raw, 1 << 20) as data:
            start = data.peek(64)[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
            yield from _elements(data, path) if start.startswith(b"[") else _lines(data)
    except OSError as error:
        raise DataError(f"--data {path}: cannot be read ({' '.join(str(error).split())})") from None


def _lines(data: io.BufferedReader) -> Iterator[bytes]:
    while line := data.readline(ROW_BYTES):
        yield line
        while len(line) == ROW_BYTES and not line.endswith(b"\n"):  # the rest of a line that is cut there
            line = data.readline(ROW_BYTES)


def _elements(data: io.BufferedReader, path: Path) -> Iterator[bytes]:
    """The elements of a JSON array, one at a time."""
    decoder, text, at, take = json.JSONDecoder(), "", 0, 1 << 20
    utf8 = io.TextIOWrapper(data, "utf-8", errors="surrogateescape", newline="")
    begun, problem = False, "it ends too early"
    while True:
        while at < len(text) and (text[at] in " \t\r\n," or (not begun and text[at] in "[\ufeff")):
            begun, at = begun or text[at] == "[", at + 1
        if text[at : at + 1] == "]":
            return
        try:
            _, end = decoder.raw_decode(text, at)
            whole = end < len(text)  # a number may go on in what is not read yet
        except (ValueError, RecursionError) as error:
            whole, problem = False, error
        if whole:
            yield text[at:end].encode("utf-8", "surrogateescape")
            at, take = end, 1 << 20
        elif len(text) - at < ROW_BYTES and (more := utf8.read(take)):
            text, at, take = text[at:] + more, 0, take * 2
        else:
            raise DataError(f"--data {path}: not a JSON array ({problem} after {text[:at][-40:]!r})")


def _from_json(text: bytes) -> object:
    if len(text) >= ROW_BYTES:
        return Dropped("row_too_large", f"over {ROW_BYTES >> 20} MiB")
    try:
        return json.loads(text.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError as error:
        return Dropped("bad_utf8", str(error))
    except (ValueError, RecursionError) as error:
        return Dropped("bad_json", str(error))


def _parquet(path: Path) -> Iterator[pa.Table]:
    try:
        for batch in pq.ParquetFile(path).iter_batches(CHUNK_ROWS):
            yield pa.Table.from_batches([batch])
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"--data {path}: cannot be read ({' '.join(str(error).split())})") from None


def _data_set(path: str) -> Iterator[pa.Table]:
    """A folder that `save_to_disk` wrote, a folder of data files, or a hub id; `:SPLIT` after it picks another than train."""
    from datasets import load_dataset, load_from_disk

    given, (path, _, split) = path, path.partition(":")
    try:
        if glob.glob(f"{path}/*state.json") or glob.glob(f"{path}/dataset_dict.json"):
            rows = load_from_disk(path)
            rows = rows[split or "train"] if hasattr(rows, "keys") else rows
        else:
            rows = load_dataset(path, split=split or "train", streaming=True)
        yield from rows.with_format("arrow").iter(CHUNK_ROWS)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"--data {given}: no such file, data set or split ({' '.join(str(error).split())[:200]})") from None


def _without_none(value: object) -> object:
    """Arrow gives every row the fields of all rows; those that a row did not have are None."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
