"""Rounds: rollout and training by turns, each on data of its own, going on where they were stopped."""

from __future__ import annotations

import json

import pytest
from processes import end_of, wait_for
from tiny import write_recipe

from configs.load import ConfigError, load
from train.batch import end_step, place, total_steps

PROMPTS = 6


@pytest.fixture
def recipe(tiny_verifier, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{index}", "turns": [f"What is {index}?"]}) + "\n" for index in range(PROMPTS)))
    overrides = {
        "store": {"path": str(tmp_path / "store"), "bytes": 4_000_000, "keep": True, "cache_path": str(tmp_path / "cache")},
        "train": {"global_batch": 2, "num_anchors": 6, "max_steps": 4, "checkpoint_every": 100},
        "rounds": {"batches": 2, "prompts": [str(prompts)]},
    }
    return write_recipe(tmp_path, tiny_verifier("llama"), overrides)


def test_each_round_takes_its_own_data_from_the_start(recipe):
    first, second = load(recipe), load(recipe, ["rounds.number=1"])
    assert total_steps(4, first) == 4 and (end_step(4, first), end_step(4, second)) == (2, 4)
    assert all((place(step, 4, first).rows == place(step + 2, 4, second).rows).all() for step in range(2))
    assert sorted([*place(0, 4, first).rows, *place(1, 4, first).rows]) == [0, 1, 2, 3]


def test_rounds_need_a_cache_and_an_end(recipe):
    with pytest.raises(ConfigError, match=r"rounds needs store\.keep and train\.max_steps"):
        load(recipe, ["train.max_steps=null"])


@pytest.mark.integration
def test_rounds_go_on_where_they_were_stopped(recipe, tree):
    run = load(recipe).run_dir
    first, second = (run / "rounds" / name for name in ("0000", "0001"))
    process = tree.python("-m", "slurm.rounds", recipe)
    wait_for(lambda: (second / "rollouts.jsonl").exists() or process.poll() is not None, 900)
    process.terminate()
    status, _, err = end_of(process, 120)
    assert status == 143, err
    before = (first / "rollouts.jsonl").stat()
    assert (run / "checkpoints" / "latest").read_text() == "step_00000002"
    status, _, err = end_of(tree.python("-m", "slurm.rounds", recipe), 900)
    assert status == 0, err
    assert "round 2 of 2" in err and "round 1 of 2" not in err
    assert (first / "rollouts.jsonl").stat().st_mtime_ns == before.st_mtime_ns
    answered = [[json.loads(line)["id"] for line in (folder / "rollouts.jsonl").open()] for folder in (first, second)]
    assert [sorted(ids) for ids in answered] == [["p0", "p1", "p2", "p3"], ["p0", "p1", "p4", "p5"]]
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()] == [1, 2, 3, 4]
    status, _, err = end_of(tree.python("-m", "slurm.rounds", recipe), 120)
    assert status == 0 and not err
