"""`slurm.plan`: what it computes, and that it refuses what cannot work by the key to change."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from in_process import InProcessPool, save_data
from tiny import python_environment, write_recipe

from configs.load import load
from extract.hf import HFVerifier
from slurm import sizes
from slurm.plan import main, report, warnings
from slurm.sizes import Facts
from store.objects import open_store
from store.sample import discard
from store.verifier import VerifierError
from train.contract import DraftContract, shapes
from train.draft import Draft

CONFIGS = Path(__file__).parents[1] / "configs"
K3 = str(CONFIGS / "kimi_k3.yaml")

LONG = ["data.length=2000000", "extract.max_model_len=2000001", "extract.batch_tokens=2000001"]
IMPOSSIBLE = [
    ("store.bytes", ["store.bytes=2_000_000_000"]),
    ("store.path", ["store.kind=local", "store.path=/dev/shm/k3"]),
    ("store.mooncake.release_s", ["store.mooncake.release_s=5"]),
    ("store.mooncake.lease_s", ["store.mooncake.lease_s=5"]),
    ("store.mooncake.orphan_s", ["store.mooncake.orphan_s=5"]),
    ("extract.batch_tokens", ["extract.batch_tokens=8192"]),
    ("extract.flags.enable-chunked-prefill", ["extract.flags.enable_chunked_prefill=true"]),
    ("extract.flags.enable-prefix-caching", ["extract.flags.enable-prefix-caching=true"]),
    ("extract.tensor_parallel", ["plan.heads=60"]),
    ("extract.nodes", ["extract.nodes=3"]),
    ("extract.nodes", ["extract.engine=transformers"]),
    ("extract.max_model_len", ["extract.max_model_len=8192"]),
    ("extract.batch_size", ["extract.batch_size=256", "pool.in_flight=64"]),
    ("draft.taps", ["draft.taps=[24,93]"]),
    ("draft.taps", ["draft.taps=[48,24]"]),
    ("draft.mask_token_id", ["draft.mask_token_id=163840"]),
    ("draft.gqa.kv_heads", ["draft.gqa.kv_heads=36"]),
    ("data.length", LONG),
    ("train.global_batch", ["train.global_batch=3"]),
    ("train.micro_tokens", ["plan.gpu_bytes=20_000_000_000"]),
    ("pool.deadline_s", ["pool.deadline_s=60", "plan.prefill=1000"]),
    ("launch.gpus", ["launch.trainers=8"]),
    ("launch.trainer_nodes", ["launch.trainer_nodes=0"]),
    ("python.extract", ["python.extract=/no/such/python"]),
]


@pytest.fixture
def no_hub(monkeypatch):
    """As on a machine where the verifier's files are not at hand."""

    def missing(path, *_):
        raise VerifierError(f"{path}: no such folder")

    monkeypatch.setattr(sizes, "text_config", missing)
    monkeypatch.setattr(sizes, "find_file", missing)


@pytest.mark.parametrize(("key", "overrides"), IMPOSSIBLE, ids=[f"{key}:{overrides[-1]}" for key, overrides in IMPOSSIBLE])
def test_what_cannot_work_is_refused_by_its_key(key, overrides, no_hub, capsys):
    try:
        status = main([K3, *overrides])
    except SystemExit as end:  # refused by the schema already
        status = end.code
    assert status == 2 and f"kimi_k3.yaml: {key}" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["kimi_k3", "kimi_k3_mla", "qwen3_8b"])
def test_the_recipes_can_work(recipe, no_hub, capsys):
    assert main([str(CONFIGS / f"{recipe}.yaml")]) == 0
    out, err = capsys.readouterr()
    assert not err and "warning: verifier.path" in out


def test_sizes_of_kimi_k3(no_hub):
    facts = Facts(load(K3, ["pool.in_flight=16", "plan.rows=100000", "plan.prefill=40000", "plan.training=20000"]))
    assert facts.nodes == 3 and facts.ranks == 4
    assert facts.token == facts.stored_token == 86_016
    assert facts.sample == pytest.approx(0.705e9, rel=1e-3) and facts.step == 4 * facts.sample
    assert facts.extractor_memory["states in KV blocks"] == 64 * 8193 * 86_016  # 45 GB on each GPU
    assert sum(facts.parameters.values()) == 2_396_090_241
    assert facts.trainer_memory["fp32 weights"] == 4 * 2_396_090_241
    text = "\n".join(report(facts))
    assert "25,000 steps" in text and "limited by the extractors: 5.7 hours, 68 GPU-hours" in text  # 100,000 samples at 40,000 tok/s
    assert any("launch.extractors" in line for line in warnings(facts))
    fp8 = Facts(load(K3, ["store.codec=fp8"]))
    assert fp8.stored_token == 5 * (7168 + 4) + 2 * 7168


@pytest.mark.parametrize("overrides", [["kimi_k3"], ["kimi_k3", "draft.draft_vocab_size=32000"], ["kimi_k3_mla"], ["qwen3_8b"]])
def test_shapes_are_the_drafts(overrides):
    """What the plan counts by arithmetic is what torch would allocate."""
    spec = DraftContract.resolve(load(CONFIGS / f"{overrides[0]}.yaml", overrides[1:]))
    with torch.device("meta"):
        draft = Draft(spec)
    assert shapes(spec) == {name: tuple(parameter.shape) for name, parameter in draft.named_parameters()}


def test_the_plan_needs_no_torch():
    command = "import sys, slurm.launch, slurm.submit, slurm.follow; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], env=python_environment()).returncode == 0


@pytest.fixture
def recipe(tiny_verifier, tmp_path):
    def make(**sections):
        return str(write_recipe(tmp_path, tiny_verifier("llama"), sections))

    return make


def test_the_verifiers_own_files_are_compared(recipe, tmp_path, capsys):
    assert main([recipe()]) == 0
    for key, override in (("draft.hidden_size", 32), ("draft.vocab_size", 512), ("draft.taps", [1, 4])):
        assert main([recipe(), f"{key}={override}", "draft.mask_token_id=3"]) == 2
        assert f"recipe.yaml: {key}: " in capsys.readouterr().err
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data_contract.json").write_text('{"length": 200}')
    assert main([recipe()]) == 2
    assert "data.length: 400, but" in capsys.readouterr().err


def test_the_stores_peak_is_as_planned(tiny_verifier, tmp_path):
    """Every sample that a rank may have asked for lies in the store at once, each as long as one may be."""
    config = load(write_recipe(tmp_path, tiny_verifier("llama"), {"pool": {"in_flight": 3}}))
    facts = Facts(config)
    assert facts.in_flight == 3 and facts.peak == 3 * facts.sample
    pool, store = InProcessPool(config), open_store(config.store)
    together, peaks = threading.Barrier(facts.in_flight), []

    def one(number: int) -> None:
        pool.make(f"run/0/{number}/0", [number + 5] * config.data.length)
        together.wait(60)
        peaks.append(store.usage().bytes)
        together.wait(60)
        discard(store, f"run/0/{number}/0")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(facts.in_flight)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert facts.peak == pytest.approx(max(peaks), rel=0.1) and store.usage().bytes == 0


def test_measured_rates_and_the_data_set(tiny_verifier, tmp_path):
    config = load(write_recipe(tmp_path, tiny_verifier("llama"), {"train": {"global_batch": 4}}))
    save_data(config, HFVerifier(config.verifier.path, "float32", config.draft.taps), samples=10)
    config.run_dir.mkdir()
    step = '{"tokens": 100, "seconds": {"fetch": %s, "forward": 0.5, "backward": 0.5}}\n'
    (config.run_dir / "metrics.jsonl").write_text(step % 1 * 4)
    facts = Facts(config)
    assert facts.rates == (50, 100) and facts.dataset[0] == 10
    assert "3 steps" in "\n".join(report(facts)) and "limited by the extractors" in "\n".join(report(facts))
    (config.run_dir / "metrics.jsonl").write_text(step % 0 * 4)
    assert Facts(config).rates == (None, 100)
