"""What is vLLM's alone: flags that a recipe may not pass, states of a rollout in one pass, draining, and the life of a request."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from test_extractor_conformance import HIDDEN, tokens
from tiny import ROOT, VLLM, write_recipe

from configs.load import ConfigError, load
from extract.engine_vllm import command_line
from extract.hf import HFVerifier
from extract.obtain import StateSource
from extract.pool import ExtractionError, Pool
from extract.render import load_tokenizer
from extract.rollout import Prompt, rollout
from extract.serve import main as serve
from store.objects import open_store
from store.sample import discard, fetch


@pytest.fixture
def recipe(tiny_verifier, tmp_path):
    def make(**extract):
        return write_recipe(tmp_path, tiny_verifier("llama"), {"extract": VLLM | extract})

    return make


def test_the_command_line_carries_the_recipe(recipe):
    flags = command_line(load(recipe(flags={"enforce_eager": True, "compilation-config": {"level": 0}}, batch_size=4)), 0, "a", 1)
    text = " ".join(flags)
    assert '--compilation-config {"level": 0} --enforce-eager --model' in text
    assert "--no-enable-prefix-caching --no-enable-chunked-prefill" in text and "--max-num-seqs 4" in text
    assert '{"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}' in text
    assert "--nnodes" not in text and "--headless" not in text


def test_the_second_node_has_no_server(recipe):
    text = " ".join(command_line(load(recipe(nodes=2, tensor_parallel=2)), 1, "10.0.0.1", 29501))
    assert "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501 --headless" in text


@pytest.mark.parametrize(
    ("extract", "message"),
    [
        ({"flags": {"no-enable-prefix-caching": True}}, "extract.flags.no-enable-prefix-caching: not a flag for a recipe (always off"),
        ({"flags": {"enable_chunked_prefill": True}}, "extract.flags.enable-chunked-prefill: not a flag for a recipe (always off"),
        ({"flags": {"tensor-parallel-size": 2}}, "not a flag for a recipe (extract.tensor_parallel)"),
        ({"batch_tokens": 400}, "extract.batch_tokens: 400 must be at least extract.max_model_len (401)"),
    ],
)
def test_settings_that_change_states_are_refused(recipe, extract, message):
    with pytest.raises(ConfigError) as error:
        command_line(load(recipe(**extract)), 0, "a", 1)
    assert message in str(error.value)


def test_a_verifier_that_vllm_cannot_serve_is_one_line(tiny_verifier, tmp_path, capsys):
    recipe = write_recipe(tmp_path, tiny_verifier("llama"), {"extract": VLLM, "draft": {"taps": [1, 4]}})
    assert serve([str(recipe)]) == 1
    out, err = capsys.readouterr()
    assert (
        err.startswith("extract.serve: draft.taps") and "has 4 layers, so a tap is one of 0..3" in err and err.count("\n") == 1 and not out
    )


def test_the_demos_train_alike():
    ours, theirs = (load(ROOT / "configs" / f"smollm2_{level}.yaml") for level in ("vllm", "embedded"))
    assert all(getattr(ours, part) == getattr(theirs, part) for part in ("draft", "loss", "train", "rollout", "launch", "verifier"))


def ask(running, sample: str, prompt: list[int], **body) -> httpx.Response:
    transfer = {"kv_transfer_params": {"sample": sample, **body.pop("transfer", {})}}
    return running.ask(prompt=prompt, temperature=0, return_token_ids=True, **transfer, **body)


@pytest.mark.integration
def test_a_rollout_publishes_its_own_states(vllm_extractor):
    """On-policy in one pass: per row what a prefill of the same tokens gives; the last token was never an input."""
    config = vllm_extractor.config
    pool, store = Pool(config), open_store(config.store)
    verifier = HFVerifier(config.verifier.path, "float32", config.draft.taps)
    prompts = [tokens(3 + 11 * index, 400 + index) for index in range(8)]

    def roll_out(index: int) -> list[int]:
        body = {"max_tokens": 60, "ignore_eos": True, "transfer": {"include_output_tokens": True}}
        return ask(vllm_extractor, f"policy/0/{index}/0", prompts[index], **body).json()["choices"][0]["token_ids"]

    with ThreadPoolExecutor(8) as askers:
        responses = list(askers.map(roll_out, range(8)))
    contract = pool.contract()
    for index, (prompt, response) in enumerate(zip(prompts, responses)):
        assert len(response) == 60
        sequence = [*prompt, *response][:-1]
        states = torch.empty(len(sequence), 4, HIDDEN)
        fetch(store, f"policy/0/{index}/0", contract, sequence, states)
        discard(store, f"policy/0/{index}/0")
        wanted = verifier.prefill([sequence])[0]
        assert float(((states - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) < 1e-5
    pool.close()


@pytest.mark.integration
def test_rollouts_leave_their_states_in_the_cache(vllm_extractor, tmp_path):
    """What `extract.rollout` kept on the way is what training asks for, but for the last token's state."""
    config = vllm_extractor.config
    store = config.store.model_copy(update={"keep": True, "cache_path": tmp_path / "cache"})
    config = config.model_copy(update={"store": store, "rollout": config.rollout.model_copy(update={"states": True})})
    prompts = [Prompt(str(index), [], [f"What is {index}?", "And why?"]) for index in range(6)]
    rollout(config, prompts, tmp_path / "rollouts.jsonl", load_tokenizer(config.verifier), Pool(config))
    source = StateSource(config, pool=None, keep=True)  # there is nobody to ask
    verifier = HFVerifier(config.verifier.path, "float32", config.draft.taps)
    source.contract = Pool(config).contract()
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").open()]
    assert len(rows) == 12 and open_store(store).usage().keys == 0
    for row in rows:
        token_ids = row["prompt_ids"] + row["response_ids"]
        states, wanted = source.buffer(len(token_ids)), verifier.prefill([token_ids])[0]
        assert source.obtain(token_ids, states) and not states[-1].any()
        assert float(((states - wanted).norm(dim=-1) / wanted.norm(dim=-1))[:-1].max()) < 1e-5


@pytest.mark.integration
@pytest.mark.ends_server
def test_sigterm_loses_none_of_those_taken(vllm_extractor):
    """Draining refuses what is new, publishes what was taken, and exits 0."""
    running, count = vllm_extractor, 32  # they fit in the store together
    pool, store = Pool(running.config), open_store(running.config.store)
    sockets = [path for end in psutil.Process(running.process.pid).net_connections("unix") if (path := Path(end.laddr)).is_socket()]
    assert sockets
    with httpx.Client(base_url=running.url, trust_env=False, timeout=60) as late, ThreadPoolExecutor(count) as askers:
        assert late.post("/v1/completions", json={}).json()["error"]["type"] == "bad_request"  # answered at once, while it is open
        taken = [askers.submit(pool.make, f"drain/0/{index}/0", tokens(390, index)) for index in range(count)]
        while store.usage().keys < 2:  # some are done, the others wait in the engine
            time.sleep(0.005)
        running.process.send_signal(signal.SIGTERM)
        while (answer := late.post("/v1/completions", json={})).status_code != 503:
            time.sleep(0.005)
    assert answer.json()["error"]["type"] == "draining"
    lost = []
    for index, future in enumerate(taken):
        try:
            future.result()
            store.read(f"drain/0/{index}/0/manifest")
        except ExtractionError as error:
            lost.append(error.cause)
        discard(store, f"drain/0/{index}/0")
    assert set(lost) <= {"draining"} and len(lost) < count, lost  # not taken, and told so at once
    assert running.process.wait(120) == 0, running.log.read_text()
    assert not list((running.config.run_dir / "extractors").glob("*")) and store.usage().keys == 0
    assert not any(path.exists() for path in sockets)
    pool.close()
