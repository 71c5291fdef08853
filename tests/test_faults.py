"""Whatever is killed, stopped, cut or overwritten: a run ends by itself, with the very numbers of one that nothing has disturbed.

Real Mooncake, the transformers engine, two ranks; all samples of all runs are the same, one of them has states that are not finite.
One thread a process and one prefill at a time, so that equal means bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch.multiprocessing as mp
from datasets import Dataset
from in_process import InProcessPool
from mooncake_lab import DEADLINE_S, ORPHAN_S, RELEASE_S, SLACK_S
from processes import Tree, wait_for
from tiny import FORKED, POISON, ROOT, VLLM, write_recipe

from configs.load import load
from configs.schema import Config
from store.contract import DataContract
from store.master_http import REGISTRATION
from train import loop

pytestmark = pytest.mark.integration

ROWS, BAD, STEPS, BATCH, LENGTH = 60, 17, 30, 4, 396
SAMPLE_BYTES = LENGTH * 4 * 64 * 4
IN_FLIGHT, RANKS = 4, 2
SEED = 4


@pytest.fixture(scope="module")
def folder(tiny_verifier, tmp_path_factory):
    """With a data set of random tokens; those of row BAD have no finite states."""
    folder, chance = tmp_path_factory.mktemp("faults"), np.random.default_rng(0)
    tokens = [chance.integers(4, POISON - 1, LENGTH).astype(np.int32) for _ in range(ROWS)]
    tokens[BAD][100] = POISON
    mask = np.array([0] * 6 + [1] * (LENGTH - 6), np.uint8)
    Dataset.from_list([{"input_ids": ids, "loss_mask": mask, "id": str(row)} for row, ids in enumerate(tokens)]).save_to_disk(
        folder / "data"
    )
    contract = DataContract(tokenizer="t", template="t", length=400, seed=0, filters={})
    (folder / "data" / "data_contract.json").write_text(contract.model_dump_json())
    return folder


def recipe(folder: Path, verifier: Path, name: str, vllm: bool = False, **store) -> Path:
    times = {"deadline_s": DEADLINE_S, "release_s": RELEASE_S, "orphan_s": ORPHAN_S}
    overrides = {
        "data": {"path": str(folder / "data")},
        "extract": {"batch_size": 1, "threads": 1} | (VLLM if vllm else {}),
        "store": {"kind": "mooncake", "bytes": 16 * SAMPLE_BYTES, "mooncake": times, **store},
        "pool": {"in_flight": IN_FLIGHT, "look_ahead": 16, "deadline_s": 240 if vllm else 60},
        "train": {
            "epochs": STEPS * BATCH // ROWS,
            "global_batch": BATCH,
            "num_anchors": 8,
            "lr": 1e-3,
            "log_every": 1,
            "checkpoint_every": 4,
            "stuck_s": 240 if vllm else 20,  # longer than a server takes to come back
        },
        "launch": {
            "extractors": 2 if vllm else 1,
            "trainers": RANKS,
            "ready_s": 300,
            "stuck_s": 30 if vllm else 5,
            "grace_s": 1,
            "restarts": dict.fromkeys(("master", "extractor", "trainer"), 6),
        },
    }
    return write_recipe(folder / name, verifier, overrides)


class Drill:
    """A run of the recipe by `drill.py`, and what to harm in it."""

    def __init__(self, path: Path, harm: bool = False):
        self.path, self.config, self.tree = path, load(path), Tree()
        self.tree.env |= {"PYTHONPATH": f"{FORKED}:{ROOT / 'tests'}", "MKL_DYNAMIC": "FALSE"}
        self.log = path.with_name("launch.log")
        with self.log.open("wb") as log:  # a pipe that nobody reads would fill
            command = [sys.executable, str(ROOT / "tests" / "drill.py"), "launch", str(path)] + ["--harm"] * harm
            self.process = subprocess.Popen(command, env=self.tree.env, stdout=log, stderr=log)

    def pid(self, role: str) -> int:
        if role == "rank":
            train = f"{sys.executable} -m train {self.path}"  # whole: `then_look` around it ends alike
            return wait_for(lambda: [pid for pid, line in self.tree.alive().items() if line == train])[0]
        file = self.config.store.path / REGISTRATION if role == "master" else self.config.run_dir / "extractors" / f"{role}.json"
        return wait_for(lambda: file.exists() and json.loads(file.read_text())["pid"], 300)

    def harm(self, role: str, signum: int, steps: int) -> None:
        """Once the log has so many lines: not before what an earlier harm has undone is done again."""
        wait_for(lambda: self.process.poll() is not None or len(lines(self.config)) >= steps, 240)
        assert self.process.poll() is None, self.log.read_text()
        os.kill(self.pid(role), signum)

    def __enter__(self) -> Drill:
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.tree.assert_gone(10)

    def end(self) -> dict[int, dict]:
        status = self.process.wait(240)
        assert status == 0, self.log.read_text()
        assert float(self.path.with_name("empty_after").read_text()) < RELEASE_S + 5 + SLACK_S
        return curve(self.config)


def lines(config: Config) -> list[str]:
    file = config.run_dir / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def curve(config: Config) -> dict[int, dict]:
    """The log's lines by step, the last one where there are several, without what depends on time."""
    found = {record["step"]: record for record in map(json.loads, lines(config))}
    return {
        step: {key: record[key] for key in record if key not in ("seconds", "retries", "store", "drops")} for step, record in found.items()
    }


def told(config: Config, group: str) -> dict[str, float]:
    """Counts by cause of rank 0, of all its launches together."""
    total: dict[str, float] = {}
    for record in map(json.loads, lines(config)):
        for cause, count in record.get(group, {}).items():
            total[cause] = max(total.get(cause, 0), count)
    return total


@pytest.fixture(scope="module")
def undisturbed(folder, tiny_verifier):
    with Drill(recipe(folder, tiny_verifier("llama", poisoned=True), "undisturbed")) as drill:
        return drill.end()


def moments(*roles: str) -> list[tuple[str, int]]:
    """After how many lines of the log each role is harmed, in an order of its own."""
    chance = random.Random(SEED)
    order = chance.sample(roles, len(roles))
    return [(role, 2 + 8 * index + chance.randrange(6)) for index, role in enumerate(order)]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_and_stopped(folder, tiny_verifier, undisturbed, signum):
    """Master, extractor and a rank in turn; the store has 0.7 of the room that the asks in flight want."""
    room = int(0.7 * IN_FLIGHT * RANKS * SAMPLE_BYTES)
    with Drill(recipe(folder, tiny_verifier("llama", poisoned=True), f"signal{signum}", bytes=room)) as drill:
        for role, steps in moments("master", "extractor-0", "rank"):
            drill.harm(role, signum, steps)
        assert drill.end() == undisturbed
    assert drill.log.read_text().count("started again") >= 3
    assert told(drill.config, "store")["room_s"] > 0


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed here")
def test_two_vllm_servers_killed_in_turn(folder, tiny_verifier, undisturbed):
    """Both die, so that the run ends with one that has come back. Their states differ from the other engine's in the last bits."""
    with Drill(recipe(folder, tiny_verifier("llama", poisoned=True), "vllm", vllm=True)) as drill:
        for role, steps in moments("extractor-0", "extractor-1"):
            drill.harm(role, signal.SIGKILL, steps)
        found = drill.end()
    assert drill.log.read_text().count("started again (1 of 6)") == 2
    assert {step: record["samples"] for step, record in found.items()} == {step: record["samples"] for step, record in undisturbed.items()}
    ours, theirs = ([record["loss"] for record in run.values()] for run in (found, undisturbed))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_what_is_cut_overwritten_lost_or_not_finite_is_made_again(folder, tiny_verifier, undisturbed):
    with Drill(recipe(folder, tiny_verifier("llama", poisoned=True), "harmed"), harm=True) as drill:
        assert drill.end() == undisturbed
    retries = told(drill.config, "retries")
    assert {"size", "checksum", "non_finite", "lost", "no_room"} <= retries.keys()


def _rank(rank: int, port: int, path: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    config = load(path)
    bad = Dataset.load_from_disk(str(config.data.path))[BAD]["input_ids"]
    loop.Pool = lambda config: InProcessPool(config, bad=(tuple(bad),))
    loop.train(config)


def test_a_row_that_is_never_finite_equals_one_that_is_known_to_be_bad(folder, tiny_verifier, undisturbed):
    path = recipe(folder, tiny_verifier("llama", poisoned=True), "known", kind="local")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mp.spawn(_rank, (port, str(path)), nprocs=RANKS)
    assert curve(load(path)) == undisturbed
    assert sum(record["samples"] for record in undisturbed.values()) == STEPS * BATCH - STEPS * BATCH // ROWS
