"""Standalone extraction: shards that share the work, captures that go on, and training on what was captured with no extractor."""

from __future__ import annotations

import json

import pytest
from datasets import load_from_disk
from in_process import InProcessPool, save_data
from tiny import write_recipe

from configs.load import load
from configs.schema import Config
from extract import capture
from extract.capture import RECORD, Captured
from extract.hf import HFVerifier
from extract.obtain import NoStates
from extract.pool import ExtractionError
from store.cache import DurableCache
from store.contract import ContractMismatch
from train import loop
from train.compare import compare

ROWS = 6


class NoExtractor:
    def __init__(self, config: Config):
        pass

    def contract(self):
        raise ExtractionError("no_extractor", "no extractor has registered")

    def make(self, name: str, token_ids: list[int]) -> None:
        self.contract()


@pytest.fixture
def config(tiny_verifier, tmp_path) -> Config:
    overrides = {
        "store": {"path": str(tmp_path / "store"), "bytes": 4_000_000, "keep": True, "cache_path": str(tmp_path / "cache")},
        "train": {"epochs": 2, "global_batch": 2, "num_anchors": 6},
        "pool": {"attempts": 1, "in_flight": 1},  # the pool in this process is for one thread
    }
    config = load(write_recipe(tmp_path, tiny_verifier("llama"), overrides))
    save_data(config, HFVerifier(config.verifier.path, "float32", config.draft.taps), ROWS)
    return config


@pytest.fixture
def pools(monkeypatch) -> list[InProcessPool]:
    """Every pool that a capture makes."""
    made: list[InProcessPool] = []
    monkeypatch.setattr(capture, "Pool", lambda config: made.append(InProcessPool(config)) or made[-1])
    return made


def test_shards_share_the_rows_and_what_is_there_is_not_made_again(config, pools):
    assert capture.capture(config, config.data.path, 0, 2).startswith("3 rows captured; ")
    assert ROWS // 2 < pools[0].asked < ROWS  # and what a handshake needs
    assert capture.capture(config, config.data.path, 1, 2).startswith("3 rows captured; ")
    assert pools[1].asked == ROWS // 2
    line = capture.capture(config, config.data.path)
    assert line.startswith(f"0 rows captured, {ROWS} were there; 0.000 GB, 0 tokens")
    assert pools[2].asked == 0 and pools[2].store.usage().keys == 0


def test_training_on_a_capture_needs_no_extractor(config, pools, monkeypatch):
    capture.capture(config, config.data.path)
    monkeypatch.setattr(loop, "Pool", NoExtractor)
    loop.train(config)
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * ROWS // 2 and all(line["loss"] > 0 for line in lines)
    line = compare(config, 100)
    assert line.startswith(f"{ROWS} samples of ") and f": {ROWS} have the checksum" in line and "0.0e+00 at most" in line


def test_the_last_token_needs_no_state(config, pools, monkeypatch):
    """A rollout that makes states on the way has none of its last token: training sees no difference."""
    capture.capture(config, config.data.path)
    monkeypatch.setattr(loop, "Pool", NoExtractor)
    loop.train(config)
    verifier, cache = (
        HFVerifier(config.verifier.path, "float32", config.draft.taps),
        DurableCache(config.store.cache_path, config.store.cache_bytes),
    )
    for file in config.store.cache_path.glob("*.states"):
        file.unlink()
    other = config.model_copy(update={"run_dir": config.run_dir.with_name("other")})
    for prompt, response in Captured.model_validate_json((config.data.path / RECORD).read_text()).examples:
        cache.put(verifier.contract, [*prompt, *response], verifier.prefill([[*prompt, *response]])[0].contiguous())
    for record in load_from_disk(config.data.path):
        cache.put(verifier.contract, record["input_ids"][:-1], verifier.prefill([record["input_ids"]])[0][:-1].contiguous())
    loop.train(other)
    losses = [[json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()] for run in (config.run_dir, other.run_dir)]
    assert losses[0] == losses[1] and len(losses[0]) == 2 * ROWS // 2


def test_training_on_half_a_capture_says_that_an_extractor_is_missing(config, pools, monkeypatch):
    capture.capture(config, config.data.path, 0, 2)
    monkeypatch.setattr(loop, "Pool", NoExtractor)
    pool = config.pool.model_copy(update={"deadline_s": 1.0})  # how long it waits for one
    with pytest.raises(NoStates, match="no_extractor"):
        loop.train(config.model_copy(update={"pool": pool}))


def test_a_capture_of_a_wrong_last_layer_is_refused(config, monkeypatch):
    monkeypatch.setattr(capture, "Pool", lambda config: InProcessPool(config, distort=lambda states: states.roll(1, 1)))
    capture.capture(config, config.data.path)
    monkeypatch.setattr(loop, "Pool", NoExtractor)
    with pytest.raises(ContractMismatch, match="wrong last layer"):
        loop.train(config)


def test_another_engine_is_refused(config, pools):
    capture.capture(config, config.data.path, 0, 2)
    record = config.data.path / RECORD
    record.write_text(record.read_text().replace('"transformers"', '"vllm"'))
    with pytest.raises(ContractMismatch, match=r"engine\.name: transformers here, vllm there"):
        capture.capture(config, config.data.path, 1, 2)


def test_a_cache_that_is_too_small_is_refused_before_anything_is_made(config, pools):
    small = config.model_copy(update={"store": config.store.model_copy(update={"cache_bytes": 10_000})})
    with pytest.raises(ValueError, match=r"store\.cache_bytes: 10,000, but the states of \d+ tokens take"):
        capture.capture(small, config.data.path)
    assert pools[0].asked == 0 and DurableCache(config.store.cache_path, config.store.cache_bytes).usage().keys == 0


@pytest.mark.parametrize("text", ["1", "2/2", "a/b", "-1/2"])
def test_a_shard_that_is_none_is_refused(config, text, capsys):
    with pytest.raises(SystemExit):
        capture.main([str(config.run_dir.parent / "recipe.yaml"), f"--shard={text}"])
    assert "is not i/n" in capsys.readouterr().err
