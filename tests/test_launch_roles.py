"""A launch of the real roles, extractor and two ranks: how it ends, how soon, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from processes import end_of, wait_for
from tiny import write_recipe

from extract.prepare_data import main as prepare_data
from store.local import LOCK

pytestmark = pytest.mark.integration


@pytest.fixture
def recipe(tiny_verifier, tmp_path) -> Path:
    """A run that trains for ever."""
    overrides = {
        "train": {"epochs": 100_000, "global_batch": 4, "num_anchors": 8, "log_every": 1},
        "launch": {"trainers": 2, "ready_s": 300},
    }
    recipe = write_recipe(tmp_path, tiny_verifier("llama"), overrides)
    rows = [{"id": str(seed), "prompt_ids": list(range(9)), "response_ids": list(range(seed, seed + 90))} for seed in range(8)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row | {"finish_reason": "length"}) + "\n" for row in rows))
    assert not prepare_data([str(recipe), "--data", str(tmp_path / "rollouts.jsonl"), "--output", str(tmp_path / "data")])
    return recipe


@pytest.fixture
def launch(tree, recipe: Path):
    """Starts the launcher with these arguments after CONFIG; afterwards nothing must be left of it."""
    yield lambda *arguments: tree.python("-m", "slurm.launch", recipe, *arguments)
    assert not tree.alive() and not list((recipe.parent / "run" / "extractors").glob("*"))
    assert [file.name for file in (recipe.parent / "store").iterdir()] == [LOCK]  # no states that nobody will read


def wait_for_steps(process, recipe: Path) -> None:
    log = recipe.parent / "run" / "metrics.jsonl"
    wait_for(lambda: process.poll() is not None or (log.exists() and len(log.read_text().splitlines()) >= 3), seconds=300)
    assert process.poll() is None, process.stderr.read()


def test_good_launch(launch, recipe):
    stale = recipe.parent / "run" / "extractors" / "extractor-7.json"  # of a launch that was killed: nobody answers there
    stale.parent.mkdir(parents=True)
    stale.write_text(json.dumps({"url": "http://127.0.0.1:9", "pid": 1}))
    status, out, err = end_of(launch("train.max_steps=2"), seconds=300)
    assert status == 0, err
    assert (recipe.parent / "run" / "checkpoints" / "latest").read_text() == "step_00000002", out
    torchrun = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "train"]
    status, out, err = end_of(launch("--", *torchrun, recipe, "train.max_steps=4"), seconds=300)  # the ranks that users start
    assert status == 0, err
    assert (recipe.parent / "run" / "checkpoints" / "latest").read_text() == "step_00000004", out


@pytest.mark.parametrize("victim", ["extractor", "rank"])
def test_killed_role(launch, tree, recipe, victim):
    process = launch()
    wait_for_steps(process, recipe)
    second = tree.python("-m", "slurm.launch", recipe)
    assert end_of(second, seconds=90)[0] == 2  # the run's folder is in use
    killed = time.monotonic()
    os.kill(tree.pid(f"-m extract.serve {recipe}" if victim == "extractor" else f"-m train {recipe}"), signal.SIGKILL)
    status, _, err = end_of(process, seconds=30)
    assert status != 0 and time.monotonic() - killed < 20
    role = "extractor-0" if victim == "extractor" else "trainers"
    assert f"launch: {role} was killed by SIGKILL; the end of {recipe.parent}/run/logs/{role}.log:\n  " in err
    assert victim == "extractor" or "slurm.role: rank " in err


def test_ctrl_c_while_training(launch, recipe):
    process = launch()
    wait_for_steps(process, recipe)
    process.send_signal(signal.SIGINT)
    assert end_of(process)[0] == 130


def test_sigterm_while_the_extractor_starts(launch, tree, recipe):
    process = launch()
    tree.pid(f"-m extract.serve {recipe}")
    process.terminate()
    assert end_of(process)[0] == 143


def test_extractor_that_dies_before_it_is_ready(launch, tree, recipe):
    process = launch()
    os.kill(tree.pid(f"-m extract.serve {recipe}"), signal.SIGKILL)
    status, _, err = end_of(process)
    assert status != 0 and "launch: extractor-0 was killed by SIGKILL" in err
