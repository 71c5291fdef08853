"""Tiny random verifiers, recipes for them, and extractors that run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
import yaml
from families import make_verifier
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from configs.load import load
from configs.schema import Config

ROOT = Path(__file__).parents[1]
VOCAB = 1024  # the tokenizer knows a few less
POISON = VOCAB - 1  # a token whose embedding is infinite, in verifiers that are made so
MASK = VOCAB - 2
FORKED = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "forked")))  # vLLM's processes start in half the time
VLLM = {"engine": "vllm", "flags": {"enforce-eager": True, "kv-cache-memory-bytes": 1 << 27}}  # of a recipe's `extract`


def save_tiny_verifier(path: Path, family: str, poisoned: bool = False) -> Path:
    """A random verifier of 4 layers, hidden 64, 4 heads and 2 KV heads whose greedy text does not repeat one token."""
    # vLLM's attention on a CPU knows no heads smaller than 32
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    make_verifier(path, "chatml")  # tokenizer, template, tokens that end a turn
    ends = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
    ids = dict(bos_token_id=None, eos_token_id=ends, pad_token_id=None, tie_word_embeddings=False)
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family](**shape, **ids, vocab_size=VOCAB, max_position_embeddings=1024)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            torch.nn.init.uniform_(parameter, 0.25, 1.75)  # a norm that does something, so that a missing one is seen
    if poisoned:
        model.get_input_embeddings().weight.data[POISON] = float("inf")
        model.get_output_embeddings().weight.data[POISON] = 0  # seldom sampled
    model.save_pretrained(path)
    return path


def write_recipe(folder: Path, verifier: Path, overrides: dict | None = None) -> Path:
    """A recipe for a tiny verifier: everything in `folder`, fp32, one thread. overrides: {"extract": {...}, ...}."""
    recipe = {
        "run_dir": str(folder / "run"),
        "verifier": {"path": str(verifier), "dtype": "float32"},
        "data": {"path": str(folder / "data"), "length": 400},
        "rollout": {"max_tokens": 24, "concurrency": 16},
        "extract": {"max_model_len": 401, "batch_size": 8, "batch_tokens": 1024, "drain_s": 100},
        "store": {"path": str(folder / "store"), "bytes": 16_000_000},
        "pool": {"deadline_s": 60},
        "draft": {"taps": [1, 2, 3], "layers": 1, "block_size": 4, "mask_token_id": MASK, "markov_rank": 8},
    }
    for section, keys in (overrides or {}).items():
        recipe[section] = {**recipe.get(section, {}), **keys} if isinstance(keys, dict) else keys
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def python_environment() -> dict[str, str]:
    """For child processes: this tree's packages, whatever the working directory, and one thread."""
    return {**os.environ, "PYTHONPATH": FORKED, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class RunningExtractor:
    recipe: Path
    config: Config
    process: subprocess.Popen
    url: str
    log: Path

    def ask(self, timeout: float = 60, **body) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout, trust_env=False)


def start_extractor(recipe: Path, timeout_s: float = 600) -> RunningExtractor:
    config = load(recipe)
    log = recipe.with_name("extractor.log")
    with log.open("wb") as output:
        command = [sys.executable, "-m", "extract.serve", str(recipe)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=python_environment())
    until = time.monotonic() + timeout_s
    while not (files := list((config.run_dir / "extractors").glob("*.json"))):
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise RuntimeError(f"the extractor did not come up:\n{log.read_text()}")
        time.sleep(0.05)
    return RunningExtractor(recipe, config, process, json.loads(files[0].read_text())["url"], log)


def stop_extractor(extractor: RunningExtractor) -> int:
    """Drain it; returns the exit status."""
    extractor.process.terminate()
    try:
        return extractor.process.wait(120)
    except subprocess.TimeoutExpired:
        extractor.process.kill()
        raise
