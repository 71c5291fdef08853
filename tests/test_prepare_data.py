"""The command as a whole: every row accounted for, the same bytes however it is run, other people's files and data sets left alone."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import hostile
import numpy as np
import pytest
from datasets import load_from_disk
from families import make_verifier
from tiny import python_environment, write_recipe

import extract.rows
from configs.load import load
from extract.conversations import Dropped
from extract.merge import draft_vocabulary
from extract.parts import fitting
from extract.prepare_data import main
from extract.render import load_tokenizer, prompt_ids
from extract.report import CAUSES


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Path:
    return Path(make_verifier(tmp_path_factory.mktemp("verifier"), "chatml").path)


@pytest.fixture
def recipe(tmp_path, verifier) -> str:
    return str(write_recipe(tmp_path, verifier, {"data": {"path": str(tmp_path / "data"), "length": 200, "min_supervised": 8}}))


def conversation(number: int, words: int = 12) -> dict:
    answer = " ".join(f"word{number * 31 + n}" for n in range(words))
    return {"id": f"c{number}", "messages": [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": answer}]}


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def files(folder: Path) -> dict[str, bytes]:
    """The data files and the list of drops, which must not depend on how they were made."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.suffix in (".arrow", ".jsonl", ".npy")}


def causes(folder: Path) -> list[tuple[int, str]]:
    drops = [json.loads(line) for line in (folder / "drops.jsonl").read_text().splitlines()]
    return [(drop["row"], drop["cause"]) for drop in drops]


def test_rows_and_drops(tmp_path, recipe, capsys):
    rollout = {"id": "r", "prompt_ids": [1, 2, 3], "response_ids": list(range(5, 25)), "finish_reason": "length"}
    rows = [
        conversation(0),
        conversation(1, 1),
        rollout,
        {"x": 1},
        conversation(0),
        conversation(2, 90),
        rollout | {"response_ids": [5000] * 9},
    ]
    data = write(tmp_path / "a.jsonl", rows)
    assert main([recipe, "--data", str(data)]) == 0
    out = tmp_path / "data"
    rows = load_from_disk(out)
    assert rows["id"][:] == ["c0", "r", "c2"] and rows.column_names == ["id", "input_ids", "loss_mask"]
    assert rows[1]["input_ids"] == [1, 2, 3, *range(5, 25)] and rows[1]["loss_mask"] == [0] * 3 + [1] * 20
    assert (
        len(rows[2]["input_ids"]) == len(rows[2]["loss_mask"]) == 200 and rows[2]["loss_mask"][-1] == 1
    )  # a last turn longer than data.length
    assert causes(out) == [(2, "few_supervised"), (4, "no_conversation"), (5, "duplicate"), (7, "bad_ids")]
    report = json.loads((out / "report.json").read_text())
    assert report["rows"] == 7 == report["kept"] + sum(report["drops"].values())
    assert report["rollouts_at_token_limit"] == report["rollouts"] == 1 and report["cut_to_length"] == 1
    assert "100% of 1 rollouts were cut at the token limit" in capsys.readouterr().out
    assert (out / "lengths.png").read_bytes().startswith(b"\x89PNG")
    counts = np.load(out / "token_counts.npy")
    assert counts.sum() == report["supervised"] == sum(sum(row["loss_mask"]) for row in rows)


def test_nothing_kept_is_a_failure(tmp_path, recipe, capsys):
    assert main([recipe, "--data", str(write(tmp_path / "a.jsonl", [{"x": 1}]))]) == 1
    assert "no row was kept" in capsys.readouterr().err and causes(tmp_path / "data") == [(1, "no_conversation")]
    assert main([recipe, "--data", str(write(tmp_path / "a.jsonl", [conversation(1)]))]) == 0


@pytest.mark.parametrize(
    ("cut", "length", "kept"), [("token", 10, 9), ("turn", 10, 6), ("token", 5, 5), ("turn", 12, 12), ("token", 20, 12), ("token", 2, 0)]
)
def test_cutting_keeps_ids_and_mask_together(cut, length, kept):
    mask = np.array([0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1], np.uint8)
    mask[9] = 0 if (cut, length) == ("token", 10) else 1
    if kept:
        assert fitting(mask, length, cut) == kept
    else:
        with pytest.raises(Dropped, match="too_long"):
            fitting(mask, length, cut)


def test_the_same_bytes_however_it_is_run(tmp_path, recipe, monkeypatch):
    monkeypatch.setattr(extract.rows, "CHUNK_ROWS", 20)
    data = write(tmp_path / "a.jsonl", [conversation(n % 150) for n in range(200)])
    keys = ["data.validation=0.2", "data.processes=1"]
    assert main([recipe, *keys, "--data", str(data), "--output", str(tmp_path / "one")]) == 0
    expected = files(tmp_path / "one")
    assert len(expected) == 5 and not (tmp_path / "one" / ".parts").exists()
    for shard in ("1/3", "0/3", "2/3"):
        assert main([recipe, *keys, "--data", str(data), "--output", str(tmp_path / "sharded"), "--shard", shard]) == 0
        assert not (tmp_path / "sharded" / "state.json").exists()
    made = {path.name: path.stat().st_ino for path in (tmp_path / "sharded" / ".parts").glob("*.arrow")}
    assert len(made) == 10
    monkeypatch.setattr("extract.parts.Maker.part", None)  # nothing is left to be made
    assert main([recipe, *keys, "--data", str(data), "--output", str(tmp_path / "sharded")]) == 0
    assert files(tmp_path / "sharded") == expected


@pytest.mark.integration
def test_killed_and_run_again_goes_on(tmp_path, recipe, tree):
    data, killed = write(tmp_path / "a.jsonl", [conversation(n, 20) for n in range(4000)]), tmp_path / "killed"
    assert main([recipe, "--data", str(data), "--output", str(tmp_path / "whole")]) == 0
    process = tree.python("-m", "extract.prepare_data", recipe, "data.processes=2", "--data", data, "--output", killed)
    try:
        while not (before := list((killed / ".parts").glob("*.arrow"))):
            assert process.poll() is None
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
    tree.assert_gone(30)  # the processes that tokenised, too
    assert len(before) < 8 and not (killed / "data_contract.json").exists()
    inodes = {part.name: part.stat().st_ino for part in (killed / ".parts").glob("*.arrow")}
    assert main([recipe, "--data", str(data), "--output", str(killed), "--shard", "0/2"]) == 0  # makes what is missing of half the parts
    assert inodes.items() <= {part.name: part.stat().st_ino for part in (killed / ".parts").glob("*.arrow")}.items()
    assert main([recipe, "--data", str(data), "--output", str(killed)]) == 0
    assert files(killed) == files(tmp_path / "whole")


def test_another_contract_is_refused(tmp_path, recipe, capsys):
    data = write(tmp_path / "a.jsonl", [conversation(n) for n in range(9)])
    out = tmp_path / "data"
    assert main([recipe, "--data", str(data)]) == 0
    before = files(out)
    for keys, difference in ([["data.length=100"], "length: 100 here, 200 there"], [["seed=1"], "seed: 1 here, 0 there"]):
        assert main([recipe, *keys, "--data", str(data)]) == 1
        assert difference in capsys.readouterr().err
    assert main([recipe, "--data", str(data)]) == 0 and "complete already" in capsys.readouterr().out
    assert main([recipe, "--data", str(write(tmp_path / "b.jsonl", [conversation(1)]))]) == 1
    assert "made of other data" in capsys.readouterr().err and files(out) == before
    assert main([recipe, "data.turns=last", "--data", str(data), "--overwrite"]) == 0
    assert json.loads((out / "data_contract.json").read_text())["filters"]["turns"] == "last"


def test_a_broken_contract_is_another_one(tmp_path, recipe, capsys):
    data = write(tmp_path / "a.jsonl", [conversation(n) for n in range(9)])
    assert main([recipe, "--data", str(data)]) == 0
    (tmp_path / "data" / "data_contract.json").write_text("{")
    assert main([recipe, "--data", str(data)]) == 1 and "data_contract.json: not a DataContract" in capsys.readouterr().err
    assert main([recipe, "--data", str(data), "--overwrite"]) == 0 and len(load_from_disk(tmp_path / "data")) == 9


def test_two_at_once_do_not_mix(tmp_path, recipe, capsys):
    data = write(tmp_path / "a.jsonl", [conversation(0)])
    assert main([recipe, "--data", str(data), "--shard", "0/1"]) == 0
    lock = tmp_path / "data" / ".parts" / "lock"
    lock.parent.mkdir(exist_ok=True, parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main([recipe, "--data", str(data), "--overwrite"]) == 1
    assert "is being put together by another process" in capsys.readouterr().err


def test_all_rows_held_out_is_a_failure(tmp_path, recipe, capsys):
    assert main([recipe, "data.validation=1", "--data", str(write(tmp_path / "a.jsonl", [conversation(0)]))]) == 1
    assert "no row was kept for training" in capsys.readouterr().err


def test_overwrite_removes_only_its_own_files(tmp_path, recipe, capsys):
    data = write(tmp_path / "a.jsonl", [conversation(n) for n in range(40)])
    out = tmp_path / "data"
    assert main([recipe, "data.validation=0.5", "--data", str(data)]) == 0
    (out / "notes.txt").write_text("mine")
    (out / "data-mine.arrow").write_text("mine")
    (out / "validation" / "notes.txt").write_text("mine")
    assert main([recipe, "--data", str(data), "--overwrite"]) == 0
    assert not (out / "held_out.jsonl").exists() and [path.name for path in (out / "validation").iterdir()] == ["notes.txt"]
    assert (out / "notes.txt").read_text() == (out / "data-mine.arrow").read_text() == "mine" and len(load_from_disk(out)) == 40
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "state.json").write_text("mine")
    for more in ([], ["--overwrite"]):
        assert main([recipe, "--data", str(data), "--output", str(stranger), *more]) == 1
        assert "did not write: state.json" in capsys.readouterr().err
    assert [path.name for path in stranger.iterdir()] == ["state.json"]


def test_rows_added_later_move_nothing(tmp_path, recipe):
    rows = [conversation(n) for n in range(120)]
    main([recipe, "data.validation=0.25", "--data", f"{write(tmp_path / 'a.jsonl', rows[:80])}@0.5", "--output", str(tmp_path / "a")])
    main([recipe, "data.validation=0.25", "--data", f"{write(tmp_path / 'b.jsonl', rows[::-1])}@0.5", "--output", str(tmp_path / "b")])
    for split, share in (("", 0.375), ("validation", 0.125)):
        few, many = (set(load_from_disk(tmp_path / name / split)["id"]) for name in "ab")
        assert few == {name for name in many if int(name[1:]) < 80} and abs(len(many) / 120 - share) < 0.1


def test_one_prompt_lies_on_one_side(tmp_path, recipe):
    rows = [conversation(n) for n in range(30)]
    again = [
        {**row, "messages": [row["messages"][0], {"role": "assistant", "content": "Another answer, of more than eight tokens: yes."}]}
        for row in rows
    ]
    assert main([recipe, "data.validation=0.4", "--data", str(write(tmp_path / "a.jsonl", rows + again))]) == 0
    held = [json.loads(line) for line in (tmp_path / "data" / "held_out.jsonl").read_text().splitlines()]
    validation = load_from_disk(tmp_path / "data" / "validation")
    assert sorted(validation["id"]) == sorted(2 * list(set(validation["id"]))) and len(held) == len(validation) > 0
    assert [row["prompt_ids"] + row["response_ids"] for row in held] == [
        ids[:-1] for ids in validation["input_ids"]
    ]  # but for the last newline


def test_later_turns_of_a_prompt_go_with_the_first(tmp_path, recipe):
    tokenizer, rows, talks = load_tokenizer(load(recipe).verifier), [], []
    for number in range(40):
        [asked, answered] = conversation(number)["messages"]
        talk = [
            asked,
            answered,
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "That is all that there is to say: no more."},
        ]
        talks.append({"id": f"c{number}", "messages": talk})
        for turn in (1, 3):
            response = [*tokenizer.encode(talk[turn]["content"]), tokenizer.eos_token_id]
            row = {"prompt_ids": prompt_ids(tokenizer, talk[:turn]), "response_ids": response, "finish_reason": "stop"}
            rows.append({"id": f"c{number}", "messages": talk[: turn + 1]} | row)
    held = []
    for name, data, turns in (("rollouts", rows, "all"), ("all", talks, "all"), ("last", talks, "last")):
        keys = [f"data.turns={turns}", "data.validation=0.3"]
        assert main([recipe, *keys, "--data", str(write(tmp_path / "a.jsonl", data)), "--output", str(tmp_path / name)]) == 0
        held.append(set(load_from_disk(tmp_path / name / "validation")["id"]))
        assert not held[-1] & set(load_from_disk(tmp_path / name)["id"])
    assert held[0] == held[1] == held[2]


def test_weights(tmp_path, recipe):
    a, b = (
        write(tmp_path / "a.jsonl", [conversation(n) for n in range(100)]),
        write(tmp_path / "b.jsonl", [conversation(n) for n in range(50, 150)]),
    )
    assert main([recipe, "--data", f"{a}@2", f"{b}@0"]) == 0
    ids = load_from_disk(tmp_path / "data")["id"][:]
    assert ids == [f"c{n}" for n in range(100) for _ in "12"]
    assert json.loads((tmp_path / "data" / "report.json").read_text())["drops"] == {"duplicate": 50, "not_taken": 50}


def test_draft_vocabulary(tmp_path, recipe):
    assert draft_vocabulary(np.array([0, 3, 0, 5, 3, 0]), 4).tolist() == [0, 1, 3, 4]
    assert (
        main([recipe, "draft.draft_vocab_size=100", "--data", str(write(tmp_path / "a.jsonl", [conversation(n) for n in range(9)]))]) == 0
    )
    counts, kept = (np.load(tmp_path / "data" / f"{name}.npy") for name in ("token_counts", "draft_vocabulary"))
    assert len(kept) == 100 and (np.diff(kept) > 0).all() and counts[kept].sum() == counts.sum() > 0


def test_show(tmp_path, recipe, capsys):
    data = write(tmp_path / "a.jsonl", [{"x": 1}, conversation(0), conversation(1), conversation(2)])
    assert main([recipe, "--data", str(data), "--show", "2"]) == 0
    shown = capsys.readouterr().out
    assert (
        "a.jsonl:1: dropped, no_conversation" in shown and "word31" in shown and "word62" not in shown and not (tmp_path / "data").exists()
    )
    with pytest.raises(SystemExit):
        main([recipe, "--data", str(data), "--show", "0"])
    assert "--show 0: rows to print, from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data", "nowhere.jsonl"],
        ["--data", "./no/where"],
        ["--data", "a@b"],
        ["verifier.path=no/such/folder", "--data", "a.jsonl"],
        ["--data", "a.jsonl", "--output", "a.jsonl/data"],
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, recipe, capsys, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", [conversation(0)])
    assert main([recipe, *arguments]) == 1
    message = capsys.readouterr().err.strip().splitlines()
    assert len(message) == 1 and message[0].startswith("prepare_data: ")


@pytest.mark.integration
def test_hostile_rows(tmp_path, recipe):
    count = 100_000
    with (tmp_path / "a.jsonl").open("wb") as sink:
        sink.writelines(hostile.lines(count))
    command = [sys.executable, "-m", "extract.prepare_data", recipe, "data.processes=2", "--data", str(tmp_path / "a.jsonl")]
    began = time.monotonic()
    ran = subprocess.run(command, env=python_environment(), capture_output=True, text=True)
    assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr
    assert time.monotonic() - began < 120 * max(1, os.getloadavg()[1] / os.cpu_count())  # a busy machine may take its time
    report = json.loads((tmp_path / "data" / "report.json").read_text())
    assert report["rows"] == count == report["kept"] + sum(report["drops"].values()) == report["kept"] + len(causes(tmp_path / "data"))
    assert report["kept"] > count / 10 and "failed" not in report["drops"]
    assert set(report["drops"]) <= set(CAUSES)
