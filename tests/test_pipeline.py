"""Prompts as people have them go the whole way: answered, prepared, their states captured, trained on without an extractor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from datasets import load_from_disk
from tiny import RunningExtractor, start_extractor, stop_extractor, write_recipe

from configs.load import load
from extract import capture, prepare_data, rollout
from train import loop

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = ROOT.parent / "shared" / "data"  # lies beside the project, not in it
PROMPTS = [ROOT / "configs" / "demo_prompts.jsonl", *(PUBLIC / f"prompts_{name}.jsonl" for name in ("gsm8k", "humaneval", "mt_bench"))]
COUNT = 16
SETTINGS = {
    "data": {"length": 900},
    "extract": {"max_model_len": 1000, "batch_tokens": 4000},
    "store": {"bytes": 64_000_000, "keep": True},
    "train": {"global_batch": 4, "num_anchors": 8, "max_steps": 2, "optimizer": "adamw"},
}


@pytest.fixture(scope="module")
def running(tiny_verifier, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    extractor = start_extractor(write_recipe(folder, tiny_verifier("llama"), _with_store(folder, SETTINGS)))
    yield extractor
    assert stop_extractor(extractor) == 0, extractor.log.read_text()


def _with_store(folder: Path, settings: dict) -> dict:
    return settings | {"store": settings["store"] | {"path": str(folder / "store"), "cache_path": str(folder / "cache")}}


@pytest.mark.integration
@pytest.mark.parametrize("prompts", PROMPTS, ids=lambda path: path.stem)
def test_prompts_to_training(running: RunningExtractor, tiny_verifier, tmp_path, prompts):
    if not prompts.exists():
        pytest.skip(f"{prompts.name} is not here: the public prompts lie beside the project")
    lines = prompts.read_text().splitlines()[:COUNT]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    recipe = str(write_recipe(tmp_path, tiny_verifier("llama"), _with_store(running.recipe.parent, SETTINGS)))
    shutil.copytree(running.config.run_dir / "extractors", tmp_path / "run" / "extractors")  # it answers this run, too
    answers = tmp_path / "rollouts.jsonl"
    assert rollout.main([recipe, "--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(answers)]) in (0, None)
    rows = {row["id"]: row for row in map(json.loads, answers.read_text().splitlines())}
    assert len(rows) == sum(len(json.loads(line)["turns"]) for line in lines)
    assert prepare_data.main([recipe, "--data", str(answers)]) == 0
    kept = load_from_disk(tmp_path / "data")
    for row in kept:  # the engine's ids, not text that was encoded again
        assert row["input_ids"] == rows[row["id"]]["prompt_ids"] + rows[row["id"]]["response_ids"]
        assert sum(row["loss_mask"]) == len(rows[row["id"]]["response_ids"])
    report = json.loads((tmp_path / "data" / "report.json").read_text())
    assert len(kept) == report["kept"] >= COUNT // 2 and set(report["drops"]) <= {"few_supervised", "duplicate"}
    assert capture.main([recipe]) == 0
    assert len(list((running.recipe.parent / "cache").glob("*.states"))) >= len(kept)
    shutil.rmtree(tmp_path / "run" / "extractors")
    loop.train(load(recipe))
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 2] and all(record["loss"] > 0 for record in log)
