"""Every kind of data file gives the same rows, in chunks that memory can hold; what is broken costs a row, or says which file."""

from __future__ import annotations

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import extract.rows
from extract.conversations import Dropped
from extract.rows import DataError, Source, chunks

ROWS = [
    {"id": f"r{n}", "messages": [{"role": "user", "content": f"{n}? é 🙂"}, {"role": "assistant", "content": "x" * (n % 7)}], "n": n}
    for n in range(1203)
]


def read(path) -> list[tuple[int, object]]:
    return [pair for chunk in chunks(Source(str(path))) for pair in chunk.parse()]


def as_lines(rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_jsonl(path):
    path.write_bytes(as_lines(ROWS))


def write_gzip(path):
    path.write_bytes(gzip.compress(as_lines(ROWS)))


def write_array(path):
    path.write_bytes(json.dumps(ROWS).encode())


def write_pretty_array(path):
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS, indent=2, ensure_ascii=False).encode() + b"\n")


def write_parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=700)


def write_saved(path):
    datasets.Dataset.from_list(ROWS).save_to_disk(path)


def write_splits(path):
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(path)


def write_folder(path):
    path.mkdir()
    write_jsonl(path / "train.jsonl")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_jsonl),
        ("a.jsonl.gz", write_gzip),
        ("a.json", write_array),
        ("b.json", write_pretty_array),
        ("c.json", write_jsonl),
        ("a.parquet", write_parquet),
        ("saved", write_saved),
        ("splits", write_splits),
        ("folder", write_folder),
    ],
)
def test_every_kind_gives_the_same_rows(tmp_path, name, write):
    write(tmp_path / name)
    assert read(tmp_path / name) == list(enumerate(ROWS, 1))
    sizes = [chunk.size for chunk in chunks(Source(str(tmp_path / name)))]
    assert sum(sizes) == len(ROWS) and max(sizes) <= extract.rows.CHUNK_ROWS


def test_another_split(tmp_path):
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:3])).save_to_disk(tmp_path / "d")
    assert len(read(f"{tmp_path / 'd'}:test")) == 3
    with pytest.raises(DataError, match="no such file, data set or split"):
        read(f"{tmp_path / 'd'}:other")


def test_arrow_rows_lack_what_they_lacked(tmp_path):
    rows = [{"messages": [{"role": "tool", "content": "b", "name": "c"}], "tools": ["d"]}, {"messages": [{"role": "user", "content": "a"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [row for _, row in read(tmp_path / "a.parquet")] == rows


def test_broken_lines_cost_a_line_each(tmp_path, monkeypatch):
    monkeypatch.setattr(extract.rows, "ROW_BYTES", 1000)
    lines = [b"\xef\xbb\xbf" + b'{"a": 1}', b"", b'{"a": ', b'{"a": "\xff"}', b"[" * 900, b'"' + b"x" * 5000 + b'"', b'{"a": 2}\r', b"null"]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    found = [(number, row.cause if isinstance(row, Dropped) else row) for number, row in read(tmp_path / "a.jsonl")]
    assert found == [
        (1, {"a": 1}),
        (3, "bad_json"),
        (4, "bad_utf8"),
        (5, "bad_json"),
        (6, "row_too_large"),
        (7, {"a": 2}),
        (8, None),
    ]


def test_an_array_may_hold_anything_and_must_end(tmp_path):
    (tmp_path / "a.json").write_bytes(b' [ 12, "a", null, {"b": [1, {}]}, [], 3.5, {"c": "\xff"} ] ')
    *good, (_, bad) = read(tmp_path / "a.json")
    assert [row for _, row in good] == [12, "a", None, {"b": [1, {}]}, [], 3.5] and bad.cause == "bad_utf8"
    for broken in (b'[{"a": 1}, {"b": ', b"[1, 2", b'[{"a": 1} x]'):
        (tmp_path / "b.json").write_bytes(broken)
        with pytest.raises(DataError, match=r"b\.json: not a JSON array"):
            read(tmp_path / "b.json")


def test_elements_across_reads(tmp_path):
    rows = [{"text": "é" * size} for size in (10, 900_000, 5, 2_000_000, 700_000)]
    (tmp_path / "a.json").write_text(json.dumps(rows, ensure_ascii=False))
    assert [row for _, row in read(tmp_path / "a.json")] == rows


def test_chunks_are_known_again_by_their_content(tmp_path):
    write_jsonl(tmp_path / "a.jsonl")
    before = [chunk.digest() for chunk in chunks(Source(str(tmp_path / "a.jsonl")))]
    (tmp_path / "a.jsonl").write_bytes(as_lines([*ROWS[:700], {"id": "new"}, *ROWS[701:], *ROWS[:600]]))
    after = [chunk.digest() for chunk in chunks(Source(str(tmp_path / "a.jsonl")))]
    assert [a == b for a, b in zip(before, after)] == [True, False, False] and len(set(after)) == len(after) == 4


def test_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "c.jsonl@2").write_text("")
    (tmp_path / "folder").mkdir()
    for path in ("a.jsonl", "c.jsonl@2", "folder:test", "some/data", "some/data:test"):
        assert Source.parse(path) == Source(path, 1.0)
    assert Source.parse("a.jsonl@0.25") == Source("a.jsonl", 0.25)
    for wrong in ("a.jsonl@x", "a.jsonl@-1", "a.jsonl@nan"):
        with pytest.raises(DataError, match="is not a weight"):
            Source.parse(wrong)
    for missing in ("b.jsonl", "b.parquet", "./no/where", "no/such/folder"):
        with pytest.raises(DataError, match=r"no such file or folder$"):
            Source.parse(missing)
    with pytest.raises(DataError, match="overrides go before --data"):
        Source.parse("train.lr=1")


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.txt", "of no known kind"), ("a.parquet", "cannot be read"), ("b.jsonl.gz", "cannot be read"), ("nobody/nothing", "no such file")],
)
def test_unreadable_files_say_which(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    if "/" not in name:
        (tmp_path / name).write_text("not what it says")
    with pytest.raises(DataError, match=message) as error:
        read(name)
    assert name in str(error.value) and "\n" not in str(error.value)
