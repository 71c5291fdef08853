"""Real vLLM serves our exports by its own method `dspark`, its Triton kernels interpreted: its drafts are ours, block for block."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from drafts import recipe, save_checkpoint
from in_process import InProcessPool, save_data
from safetensors.torch import load_file
from scipy.stats import kstest
from tiny import FORKED, MASK, ROOT, python_environment

from configs.schema import Evaluate, Pool, Train
from extract.hf import HFVerifier
from train import decode, loop
from train.checkpoint import latest, load_draft
from train.evaluate import evaluate
from train.export import check_engine, export, main
from train.formats import FormatError, format_of
from train.verifier import FrozenVerifier

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
]
PROMPTS, TOKENS = 4, 32
ALSO = {"full": {}, "sliding": {"draft_vocab_size": 100}}  # both conventions of one draft must be right for its blocks to be
DRAWS, TEMPERATURE = 30, 0.3  # of answers that are drawn: a second each, interpreted
FLAGS = {
    "dtype": "float32",
    "max-model-len": 128,
    "max-num-batched-tokens": 128,
    "max-num-seqs": 1,
    "kv-cache-memory-bytes": 1 << 27,
    "generation-config": "vllm",
}


@pytest.fixture(scope="module")
def trained(tiny_verifier, tmp_path_factory):
    """trained(kind) → recipe, rollouts, checkpoint and export of a draft that is right about half of the time, made once."""
    made = {}

    def make(kind: str):
        if kind not in made:
            folder, verifier_path = tmp_path_factory.mktemp(kind), tiny_verifier("llama")
            config = recipe(folder, verifier_path, kind, block_size=6, markov_rank=16, **ALSO[kind])
            train = Train(epochs=30, global_batch=PROMPTS, num_anchors=64, lr=2e-3, muon={"lr": 2e-2}, checkpoint_every=1000)
            verifier = HFVerifier(verifier_path, "float32", config.draft.taps)
            rollouts = save_data(config, verifier, PROMPTS, response=TOKENS)
            if config.draft.draft_vocab_size:  # half of what is said is in it
                said = np.unique([token for line in rollouts.read_text().splitlines() for token in json.loads(line)["response_ids"]])[::2]
                rest = np.setdiff1d(np.arange(verifier.vocab_size), said)
                np.save(config.data.path / "draft_vocabulary.npy", np.sort(np.r_[said, rest[: 100 - len(said)]]))
            evaluate = Evaluate(sets=(str(rollouts),), max_tokens=TOKENS)
            config = config.model_copy(update={"train": train, "pool": Pool(in_flight=1), "evaluate": evaluate})
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(loop, "Pool", InProcessPool)
                loop.train(config)
            checkpoint = latest(config.run_dir / "checkpoints")
            export(checkpoint, folder / "export", format_of(load_draft(checkpoint).spec), torch.float32)
            made[kind] = config, [json.loads(line) for line in rollouts.read_text().splitlines()], checkpoint, folder / "export"
        return made[kind]

    return make


@contextmanager
def serving(verifier: str, folder: Path, record: Path, **speculative):
    """The URL of a vLLM that serves verifier and draft."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    block_size = json.loads((folder / "config.json").read_text())["block_size"]
    speculative = {"method": "dspark", "model": str(folder), "num_speculative_tokens": block_size, **speculative}
    command = [sys.executable, "-m", "slurm.role", "--grace", "10", "--", sys.executable]  # nothing outlives the test
    command += ["-m", "vllm.entrypoints.openai.api_server", "--model", verifier, "--port", str(port)]
    command += ["--enforce-eager", "--no-enable-prefix-caching", "--disable-hybrid-kv-cache-manager"]
    command += ["--speculative-config", json.dumps(speculative)]
    command += [text for name, value in FLAGS.items() for text in (f"--{name}", str(value))]
    env = python_environment() | {
        "PYTHONPATH": os.pathsep.join((FORKED, str(ROOT / "tests" / "interpreted"))),
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "RECORD_DRAFTS": str(record),
    }
    log = record.with_suffix(".log")
    with tempfile.TemporaryDirectory() as scratch, log.open("wb") as output:  # where it leaves its sockets
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env | {"TMPDIR": scratch})
        try:
            until = time.monotonic() + 600
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None and time.monotonic() < until, log.read_text()[-6000:]
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(120)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def blocks_of_engine(url: str, verifier: str, prompts: list[list[int]], record: Path) -> list[dict]:
    """Of each prompt: the response, the blocks as (position of the anchor, drafts), and their hidden states by the anchor."""
    results = []
    for prompt in prompts:
        record.write_text("")
        body = {"model": verifier, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600, trust_env=False).raise_for_status().json()
        lines = [json.loads(line) for line in record.read_text().splitlines()]
        blocks = [(line["anchor"], line["drafts"]) for line in lines]
        hidden = {line["anchor"]: torch.tensor(line["hidden"]) for line in lines}
        results.append({"response": answer["choices"][0]["token_ids"], "blocks": blocks, "hidden": hidden})
    return results


def blocks_of_closed_loop(config, folder: Path, prompts: list[list[int]]) -> list[dict]:
    draft = load_draft(folder)
    verifier = HFVerifier(config.verifier.path, "float32", draft.spec.taps)
    frozen = FrozenVerifier.load(config.verifier.path, torch.float32, verifier.device, draft.kept)
    blocks, hidden, propose, block = [], {}, decode.propose, draft.block

    def recorded(draft, frozen, context, tokens, anchors, sampler):
        drafts, p = propose(draft, frozen, context, tokens, anchors, sampler)
        blocks.append((int(anchors), drafts[0].tolist()))
        return drafts, p

    def hidden_of(slots, anchors, context):
        out = block(slots, anchors, context)
        hidden[int(anchors)] = out[0, 0]
        return out

    results = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decode, "propose", recorded)
        patched.setattr(draft, "block", hidden_of)
        for prompt in prompts:
            blocks.clear()
            hidden.clear()
            (result,) = decode.speculate(verifier, draft, frozen, [prompt], TOKENS)
            results.append({"response": result.response_ids, "blocks": list(blocks), "hidden": dict(hidden), "accepted": result.accepted})
    return results


def same_blocks(engine: list[dict], ours: list[dict]) -> float:
    """The share of our blocks that the engine drafted, too. (After the last one it may draft once more.)"""
    pairs = [(block, theirs["blocks"]) for theirs, mine in zip(engine, ours) for block in mine["blocks"]]
    return sum(block in theirs for block, theirs in pairs) / len(pairs)


def assert_same_blocks(engine: list[dict], ours: list[dict]) -> None:
    assert [result["response"] for result in engine] == [result["response"] for result in ours]
    assert same_blocks(engine, ours) == 1
    for theirs, mine in zip(engine, ours):  # tokens alone would hide what is small: a norm's weights of another layer
        for anchor, hidden in mine["hidden"].items():
            torch.testing.assert_close(theirs["hidden"][anchor], hidden, rtol=0, atol=5e-5)
    accepted = [count for result in ours for count in result["accepted"]]
    assert 0.5 < sum(accepted) / len(accepted) < 5.5  # else equality would say little


def draws_of_engine(url: str, verifier: str, prompt: list[int]) -> list[tuple[int, int]]:
    """The first two tokens of DRAWS answers: one is drawn after the prefill, one by verification of drafts."""
    body = {"model": verifier, "prompt": prompt, "max_tokens": 2, "temperature": TEMPERATURE, "return_token_ids": True}
    with httpx.Client(timeout=600, trust_env=False) as client:
        answers = [client.post(f"{url}/v1/completions", json=body | {"seed": seed}).raise_for_status().json() for seed in range(DRAWS)]
    return [tuple(answer["choices"][0]["token_ids"]) for answer in answers]


def chance(draws: list[tuple[int, int]], config, prompt: list[int]) -> float:
    """The p-value of such draws if both tokens are the verifier's. Where a drawn token lies among all, the likeliest first, is
    uniform then (a random place within its own share), so Kolmogorov and Smirnov can say, however flat the distribution is."""
    verifier, random = HFVerifier(config.verifier.path, "float32", config.draft.taps), np.random.default_rng(0)

    @cache
    def places(ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        q = (verifier.model(torch.tensor([ids])).logits[0, -1].double() / TEMPERATURE).softmax(-1).detach().numpy()
        order = np.argsort(-q)
        before = np.empty_like(q)
        before[order] = q[order].cumsum() - q[order]
        return before, q

    def place(ids: tuple[int, ...], token: int) -> float:
        before, q = places(ids)
        return before[token] + random.random() * q[token]

    uniform = [place(ids, token) for first, second in draws for ids, token in (((*prompt,), first), ((*prompt, first), second))]
    return kstest(uniform, "uniform").pvalue


def assert_reports_agree(url: str, config, rollouts: list[dict], checkpoint: Path, folder: Path) -> None:
    """`train.evaluate` with this engine: greedy, equal answer by answer; drawn, within the stated error."""
    rows = [row | {"id": f"p-{row['id']}{turn}"} for turn in range(2) for row in rollouts]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    greedy = config.evaluate.model_copy(update={"engine": url})
    sampling = {"sets": (str(folder / "prompts.jsonl"),), "rule": "standard", "temperature": TEMPERATURE, "max_tokens": 12}
    drawn = greedy.model_copy(update=sampling)
    reports = [evaluate(config.model_copy(update={"evaluate": settings}), checkpoint) for settings in (greedy, drawn)]
    for theirs, ours in zip(*(reports[0]["records"][name] for name in ("engine", "closed_loop")), strict=True):
        assert theirs["sums"] == {key: ours["sums"][key] for key in theirs["sums"]}
    agreements = [report[name] for report in reports for name in ("engine_agreement", "agreement")]
    assert all(agreement["agree"] for agreement in agreements), agreements


def test_greedy_blocks_and_counters(trained, tmp_path, monkeypatch, capsys):
    """Of a sliding window and a reduced vocabulary."""
    config, rollouts, checkpoint, folder = trained("sliding")
    prompts = [row["prompt_ids"] for row in rollouts]
    ours = blocks_of_closed_loop(config, folder, prompts)
    with serving(config.verifier.path, folder, tmp_path / "drafts.jsonl") as url:
        assert_same_blocks(blocks_of_engine(url, config.verifier.path, prompts, tmp_path / "drafts.jsonl"), ours)
        monkeypatch.setattr(sys, "argv", ["export", str(checkpoint), "--check", str(folder), "--engine", url])
        main()
    accepted = [count for result in ours for count in result["accepted"]]
    counts = [len(accepted), *(sum(count > slot for count in accepted) for slot in range(6))]
    line = f"drafts, and accepted by position: {counts} in the engine, {counts} in the closed loop ({PROMPTS} prompts)"
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_drawn_tokens_reports_and_a_wrong_mask(trained, tmp_path):
    """Of full attention; drafts are drawn, which greedy requests do not notice."""
    config, rollouts, checkpoint, folder = trained("full")
    prompts = [row["prompt_ids"] for row in rollouts]
    with serving(config.verifier.path, folder, tmp_path / "drafts.jsonl", draft_sample_method="probabilistic") as url:
        engine = blocks_of_engine(url, config.verifier.path, prompts, tmp_path / "drafts.jsonl")
        assert_same_blocks(engine, blocks_of_closed_loop(config, folder, prompts))
        assert chance(draws_of_engine(url, config.verifier.path, prompts[0]), config, prompts[0]) > 1e-3
        assert_reports_agree(url, config, rollouts, checkpoint, tmp_path)
        wrong = told_to_be_causal(folder, tmp_path / "wrong")  # as the engine is not; the draft was trained both ways
        ours = blocks_of_closed_loop(config, wrong, prompts)
        assert [result["response"] for result in ours] == [row["response_ids"] for row in rollouts]  # slower, and lossless all the same
        assert same_blocks(engine, ours) < 0.8
        with pytest.raises(FormatError, match="drafts, and accepted by position"):
            check_engine(url, wrong, config)


def told_to_be_causal(folder: Path, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    told = json.loads((copy / "config.json").read_text())
    told["transformer_layer_config"]["is_causal"] = True
    (copy / "config.json").write_text(json.dumps(told))
    return copy


def test_vllm_knows_config_and_names_of_an_mla_draft(tiny_verifier, tmp_path):
    """What can be shown without serving: on CPUs vLLM repacks `kv_b_proj` before its MLA splits it, and attends one way only."""
    from vllm.models.kimi_k3.nvidia.dspark_mla import K3DSparkForCausalLM
    from vllm.transformers_utils.config import get_config

    checkpoint = save_checkpoint(recipe(tmp_path, tiny_verifier("llama"), "mla"))
    export(checkpoint, tmp_path / "export", "k3_dspark", torch.float32)
    config = get_config(str(tmp_path / "export"), trust_remote_code=False)
    assert type(config).__name__ == "K3DSparkConfig" and config.target_layer_ids == [0, 1, 2] and config.mask_token_id == MASK
    attention = ("fused_qkv_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj")
    layer = [f"self_attn.{name}" for name in attention] + [
        "mlp.gate_up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ]
    expected = {f"model.layers.{number}.{name}.weight" for number in range(2) for name in layer}
    expected |= {f"model.{name}.weight" for name in ("context_proj", "context_norm", "final_norm")}
    expected |= {f"model.markov_head.{name}.weight" for name in ("markov_w1", "markov_w2")}
    mapped = K3DSparkForCausalLM.hf_to_vllm_mapper.apply_list(list(load_file(tmp_path / "export" / "model.safetensors")))
    assert set(mapped) == expected  # the embedding is the verifier's; the confidence head is for adaptive verification
