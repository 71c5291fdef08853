"""Validation while training: the same numbers as a simulation of the held-out responses, and the best checkpoint kept."""

from __future__ import annotations

import json

import numpy as np
import pytest
from datasets import load_from_disk
from in_process import InProcessPool, save_data
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import write_recipe

from configs.load import load
from extract.hf import HFVerifier
from train import loop
from train.checkpoint import load_draft
from train.simulate import expected_walk, simulate
from train.validate import spans
from train.verifier import FrozenVerifier


def test_spans():
    assert spans(np.array([0, 1, 1, 0, 0, 1])) == [(1, 3), (5, 6)] and spans(np.array([1, 1])) == [(0, 2)] and spans(np.zeros(3)) == []


def test_validation_keeps_the_best(tiny_verifier, tmp_path, monkeypatch):
    train = {
        "max_steps": 6,
        "epochs": 9,
        "global_batch": 2,
        "optimizer": "adamw",
        "lr": 2e-3,
        "checkpoint_every": 100,
        "keep_checkpoints": 1,
    }
    train |= {"validate_every": 2, "validation_samples": 3, "milestones": [0.2], "num_anchors": 8}
    store = {"path": str(tmp_path / "store"), "bytes": 4_000_000}
    config = load(write_recipe(tmp_path, tiny_verifier("llama"), {"train": train, "store": store}))
    verifier = HFVerifier(config.verifier.path, "float32", config.draft.taps)
    save_data(config, verifier, 5)
    load_from_disk(config.data.path).save_to_disk(config.data.path / "validation")
    monkeypatch.setattr(loop, "Pool", lambda config: InProcessPool(config))
    loop.train(config)
    records = [json.loads(line) for line in (config.run_dir / "validation.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 4, 6]
    values = [record["tokens_per_forward"] for record in records]
    root = config.run_dir / "checkpoints"
    best = 2 * (1 + values.index(max(values)))
    assert (root / "best").resolve().name == f"step_{best:08d}"
    assert {folder.name for folder in root.glob("step_*")} == {"step_00000001", f"step_{best:08d}", "step_00000006"}
    frozen = FrozenVerifier.load(config.verifier.path, verifier.model.dtype, verifier.device)
    tokens, forwards = 0, 0.0
    for row in load_from_disk(config.data.path).with_format("numpy").select(range(3)):
        ids = row["input_ids"].tolist()
        for response in simulate(load_draft(root / "step_00000006"), frozen, ids, spans(row["loss_mask"]), verifier.prefill([ids])[0]):
            tokens, forwards = tokens + len(response.survival), forwards + expected_walk(response.survival).forwards
    assert values[-1] == pytest.approx(tokens / forwards)
    board = EventAccumulator(str(config.run_dir / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("validation/tokens_per_forward")] == [2, 4, 6]
