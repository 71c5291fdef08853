"""Parts become the data set: duplicates out, sources by weight, prompts held out, everything counted, in one pass over the files."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import DatasetInfo, Features, List, Value

from configs.schema import Config
from extract.parts import Part
from extract.rows import Source

FEATURES = Features({"id": Value("string"), "input_ids": List(Value("int32")), "loss_mask": List(Value("uint8"))})
DATA = "data-00000-of-00001.arrow"
VALIDATION = "validation"  # folder beside the training files


@dataclass
class Summary:
    """What became of all rows. `tokens` and `supervised` hold one number a kept row."""

    rows: int = 0
    cut: int = 0
    finished: Counter = field(default_factory=Counter)  # rollouts by finish reason
    drops: Counter = field(default_factory=Counter)
    sources: dict[str, Counter] = field(default_factory=dict)  # rows, kept, tokens, supervised
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    supervised: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    training: int = 0  # rows written, repeated ones too
    validation: int = 0


def merge(parts: list[Part], sources: list[Source], config: Config, vocab_size: int, folder: Path) -> Summary:
    """Write the data set's files to `folder`, the validation set's to a folder in it where rows are held out."""
    summary = Summary(sources={source.path: Counter() for source in sources})
    counts = np.zeros(vocab_size, np.int64)
    lengths, supervised = [], []
    with ExitStack() as stack:
        drops, held_out = (stack.enter_context((folder / name).open("w")) for name in ("drops.jsonl", "held_out.jsonl"))
        training, validation = DataFile(folder), DataFile(folder / VALIDATION)
        for part, new in zip(parts, _first_seen(parts), strict=True):
            table, about = part.read()
            source, record = sources[part.source], summary.sources[sources[part.source].path]
            times = _times(table, source.weight) * new
            ids, mask = table["input_ids"].combine_chunks(), table["loss_mask"].combine_chunks()
            sums = np.add.reduceat(np.append(mask.values.to_numpy(), 0), mask.offsets.to_numpy()[:-1], dtype=np.int32)
            kept, repeats = np.flatnonzero(times), np.repeat(np.arange(len(times)), times)
            held = _share(table["prompt"].to_numpy()) < config.data.validation
            lengths.append(ids.value_lengths().to_numpy()[kept])
            supervised.append(sums[kept])
            training.write(taken := table.take(repeats[~held[repeats]]))
            validation.write(out := table.take(kept[held[kept]]))
            counts += _supervised_counts(taken, vocab_size)
            for row in out.to_pylist():
                held_out.write(json.dumps(_as_rollout(row)) + "\n")
            lost = [[row, "duplicate", ""] for row in table["row"].to_numpy()[~new]]
            lost += [[row, "not_taken", f"weight {source.weight}"] for row in table["row"].to_numpy()[new & (times == 0)]]
            for row, cause, detail in sorted(about["drops"] + lost):
                drops.write(json.dumps({"source": source.path, "row": int(row), "cause": cause, "detail": detail}) + "\n")
                summary.drops[cause] += 1
            summary.rows, summary.cut = summary.rows + about["rows"], summary.cut + about["cut"]
            summary.finished.update(about["finished"])
            record.update(rows=about["rows"], kept=len(kept), tokens=int(lengths[-1].sum()), supervised=int(supervised[-1].sum()))
        summary.training, summary.validation = training.close(), validation.close()
    if not summary.validation:
        (folder / "held_out.jsonl").unlink()
    summary.tokens, summary.supervised = np.concatenate(lengths or [[]]), np.concatenate(supervised or [[]])
    np.save(folder / "token_counts.npy", counts)
    if config.draft.draft_vocab_size and config.draft.draft_vocab_size < vocab_size:
        np.save(folder / "draft_vocabulary.npy", draft_vocabulary(counts, config.draft.draft_vocab_size))
    return summary


def draft_vocabulary(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` tokens most often supervised, int64 ascending; `counts` [V]. Ties and tokens never seen go by id."""
    return np.sort(np.argsort(-counts, kind="stable")[:size])


class DataFile:
    """The one file of a data set, written table by table, and what `datasets.load_from_disk` wants beside it."""

    def __init__(self, folder: Path):
        self.folder, self.rows, self.writer = folder, 0, None
        self.digest = hashlib.blake2b(digest_size=8)  # of the content, since `datasets` keeps results under it

    def write(self, table: pa.Table) -> None:
        if not len(table):
            return
        if self.writer is None:
            self.folder.mkdir(exist_ok=True)
            self.writer = pa.ipc.new_stream(str(self.folder / DATA), FEATURES.arrow_schema)
        for content in table["content"].to_pylist():
            self.digest.update(content)
        self.writer.write_table(table.select(list(FEATURES)).cast(FEATURES.arrow_schema))
        self.rows += len(table)

    def close(self) -> int:
        """Number of rows; without any there is no file."""
        if self.writer is not None:
            self.writer.close()
            DatasetInfo(features=FEATURES).write_to_directory(str(self.folder))
            state = {"_data_files": [{"filename": DATA}], "_fingerprint": self.digest.hexdigest(), "_split": None}
            state |= {"_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False}
            (self.folder / "state.json").write_text(json.dumps(state, indent=2))
        return self.rows


def _first_seen(parts: list[Part]) -> Iterator[np.ndarray]:
    """For each part bool [rows], True where no row before has the same content. Holds 16 bytes a row."""
    tables = (part.read()[0]["content"].combine_chunks() for part in parts)
    hashes = [np.frombuffer(column.buffers()[1], "V16", len(column)).copy() for column in tables]
    everything = np.concatenate(hashes) if hashes else np.zeros(0, "V16")
    first = np.zeros(len(everything), bool)
    first[np.unique(everything, return_index=True)[1]] = True
    yield from np.split(first, np.cumsum([len(each) for each in hashes])[:-1])


def _times(table: pa.Table, weight: float) -> np.ndarray:
    """int64 [rows]: how often each row is taken, `weight` on average, by its content, so that other rows move nothing."""
    content = table["content"].combine_chunks()
    words = np.frombuffer(content.buffers()[1], "<u8", 2 * len(content))[::2]
    return np.floor(weight + _share(words)).astype(np.int64)


def _share(words: np.ndarray) -> np.ndarray:
    """uint64 hashes as numbers in [0, 1)."""
    return (words >> np.uint64(11)) / 2.0**53


def _supervised_counts(table: pa.Table, vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int64)
    for ids, mask in zip(table["input_ids"].chunks, table["loss_mask"].chunks, strict=True):
        counts += np.bincount(ids.flatten().to_numpy()[mask.flatten().to_numpy() == 1], minlength=vocab_size)
    return counts


def _as_rollout(row: dict) -> dict:
    """A held-out row as what an engine was given and what it answered first."""
    mask = np.array(row["loss_mask"])
    begin = int(mask.argmax())
    end = begin + int((mask[begin:] == 0).argmax()) if (mask[begin:] == 0).any() else len(mask)
    return {"id": row["id"], "prompt_ids": row["input_ids"][:begin], "response_ids": row["input_ids"][begin:end]}
