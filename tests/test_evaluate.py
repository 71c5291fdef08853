"""One command, three readings: they agree, travel with their protocol, and end in a report that a model card can carry."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter

import httpx
import numpy as np
import pytest
from drafts import save_checkpoint
from in_process import InProcessPool, save_data
from scipy.special import expit, logit
from tiny import write_recipe

from configs.load import load
from extract.hf import HFVerifier
from train import counters, evaluate, sets
from train.card import model_card
from train.checkpoint import load_draft, read_record
from train.confidence import calibration, ece, fit_temperatures
from train.counters import EngineError, ask_engine, read_counters
from train.decode import speculate
from train.export import check_engine
from train.protocol import differences
from train.report import write_report
from train.sets import read_sets
from train.simulate import Response
from train.verifier import FrozenVerifier

SAMPLES = 6


@pytest.fixture(scope="module")
def folder(tiny_verifier, tmp_path_factory):
    """Rollouts of a tiny verifier, a data set of them, a checkpoint and another one."""
    folder = tmp_path_factory.mktemp("evaluate")
    config = recipe(folder, tiny_verifier("llama"))
    save_data(config, HFVerifier(config.verifier.path, "float32", config.draft.taps), SAMPLES)
    save_checkpoint(config)
    save_checkpoint(config.model_copy(update={"run_dir": folder / "other"}), seed=1)
    return folder


def recipe(folder, verifier, **settings):
    settings = {"sets": [str(folder / "rollouts.jsonl")], "max_tokens": 24, "batch_size": 4} | settings
    store = {"path": str(folder / "store"), "bytes": 16_000_000}
    return load(write_recipe(folder, verifier, {"evaluate": settings, "store": store}))


def checkpoint_of(folder, run="run"):
    return folder / run / "checkpoints" / "step_00000001"


@pytest.fixture(scope="module")
def measured(folder, tiny_verifier):
    return evaluate.evaluate(recipe(folder, tiny_verifier("llama")), checkpoint_of(folder), checkpoint_of(folder, "other"))


def test_loop_and_simulation_agree_and_lose_nothing(measured):
    assert measured["main"] == "closed_loop"
    assert measured["identical"] + measured["near_ties"] == SAMPLES and measured["wrong"] == 0
    assert measured["agreement"]["agree"] and measured["agreement"]["identical"] == SAMPLES
    loop, simulation = (measured["readings"][name]["tokens_per_forward"] for name in ("closed_loop", "simulation"))
    assert loop == simulation and loop["interval"][0] <= loop["value"] <= loop["interval"][1]


def test_the_report_is_written_and_goes_into_the_card(measured, folder, tiny_verifier):
    run = folder / "run"
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "loss": 1 / s, "block_length": 1}) + "\n" for s in (1, 2)))
    (run / "validation.jsonl").write_text(json.dumps({"step": 2, "tokens_per_forward": 1.5}) + "\n")
    diagnosis = {"faults": ["taps"], "limits": [], "checks": [{"name": "taps", "verdict": "fault", "detail": "shifted by one"}]}
    text = write_report(run, measured | {"diagnosis": diagnosis})
    for part in ("| closed loop", "vs reference", "| protocol |", "taps", "calibration error", "of those that accepted the one before"):
        assert part in text
    for figure in ("positions", "histogram", "sets", "context", "calibration", "training"):
        assert (run / f"{figure}.png").stat().st_size > 5000 and f"{figure}.png" in text
    checkpoint = checkpoint_of(folder)
    card = model_card(load_draft(checkpoint).spec, read_record(checkpoint), checkpoint)
    assert "| closed loop" in card and "vs reference" in card
    other = checkpoint_of(folder, "other")
    assert "was not measured" in model_card(load_draft(other).spec, read_record(other), other)


def test_a_draft_against_itself_is_no_different(folder, tiny_verifier):
    same = evaluate.evaluate(recipe(folder, tiny_verifier("llama")), checkpoint_of(folder), checkpoint_of(folder))["pairs"]
    assert same["all"]["difference"] == {"value": 0, "interval": [0, 0]} and same["wins"] == same["losses"] == 0


def test_other_protocols_are_not_compared_in_silence(measured, folder, tiny_verifier):
    run = folder / "earlier"
    write_report(run, measured)
    config = recipe(folder, tiny_verifier("llama"), max_tokens=20)
    report = evaluate.evaluate(config, checkpoint_of(folder), run / "report.json")
    assert any("max_tokens: 20 here, 24 there" in warning for warning in report["warnings"])
    assert "**Warning**" in write_report(run, report)
    assert differences(measured["protocol"], measured["protocol"]) == []


def test_simulation_alone_takes_states_from_the_extractor(measured, folder, tiny_verifier, monkeypatch):
    config = recipe(folder, tiny_verifier("llama"), readings=["simulation"])
    record = checkpoint_of(folder) / "checkpoint.json"
    pool = InProcessPool(config)
    record.write_text(json.dumps(json.loads(record.read_text()) | {"states": pool.contract().model_dump()}))
    monkeypatch.setattr(evaluate, "Pool", lambda config: pool)
    report = evaluate.evaluate(config, checkpoint_of(folder), checkpoint_of(folder, "other"))
    assert pool.asked == 2 * SAMPLES and report["main"] == "simulation"
    assert report["readings"]["simulation"]["tokens_per_forward"] == measured["readings"]["simulation"]["tokens_per_forward"]
    assert report["pairs"]["all"] == measured["pairs"]["all"]


def test_sampled_rules_agree_within_their_error(folder, tiny_verifier):
    for rule in ("standard", "block", "greedy_drafts"):
        report = evaluate.evaluate(recipe(folder, tiny_verifier("llama"), rule=rule, temperature=3.0), checkpoint_of(folder))
        assert report["agreement"]["agree"], (rule, report["agreement"])
        assert "identical" not in report and report["protocol"]["temperature"] == 3.0


def test_turns_are_answered_in_order(folder, tiny_verifier, tmp_path):
    prompts = tmp_path / "talk.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"talk-{i}", "turns": ["Hello", "And then?"]}) + "\n" for i in range(3)))
    config = recipe(folder, tiny_verifier("llama"), sets=[str(prompts)], limit=2, max_tokens=8)
    report = evaluate.evaluate(config, checkpoint_of(folder))
    records = report["records"]["closed_loop"]
    assert [record["id"] for record in records] == ["talk-0", "talk-0/2", "talk-1", "talk-1/2"]
    assert {(record["set"], record["conversation"]) for record in records} == {("talk", "talk-0"), ("talk", "talk-1")}
    assert set(report["readings"]["closed_loop"]["turns"]) == {"1", "2"}
    with pytest.raises(ValueError, match="have no answer"):
        evaluate.evaluate(recipe(folder, tiny_verifier("llama"), sets=[str(prompts)], readings=["simulation"]), checkpoint_of(folder))


def test_sets_by_name_and_bad_ones(monkeypatch, tmp_path):
    rows = [{"category": "qa", "turns": ["a", "b"]}, {"category": "rag", "turns": ["c"]}]
    monkeypatch.setattr("datasets.load_dataset", lambda path, config, split: rows)
    assert [question.id for question in read_sets(("speed_qa",), None, 8)] == ["speed_qa-0000", "speed_qa-0000/2"]
    assert {question.set for question in read_sets(("speed_qa", "speed_rag"), None, 8)} == {"speed_qa", "speed_rag"}

    def unreachable(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(ValueError, match="cannot be loaded from the hub"):
        read_sets(("gsm8k",), None, 8)
    assert len(sets.PUBLIC) == 13  # the sets of the card
    bad = tmp_path / "bad.jsonl"
    for line, message in (("{", "bad.jsonl:1: not JSON"), ('{"id": 1}', "bad.jsonl:1: neither prompt nor rollout"), ("", "no prompts")):
        bad.write_text(line)
        with pytest.raises(ValueError, match=message):
            read_sets((str(bad),), None, 8)
    with pytest.raises(ValueError, match="is empty: name files"):
        read_sets((), None, 8)
    with pytest.raises(ValueError, match="no such file, and no public set"):
        read_sets(("gsm9k",), None, 8)


VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 36.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 0.0
"""


def test_counters_of_both_engines():
    expected = {"forwards": 12, "at_least/1": 6, "at_least/2": 3}
    assert +read_counters(metrics=VLLM) == expected
    stats = {"enabled": True, "total_draft_tokens": 36, "total_accepted_tokens": 9, "distribution": {"0": 6, "1": 3, "2": 3}}
    assert +read_counters(mtp_stats=stats) == expected
    for empty in ({"metrics": "vllm:num_requests_running 0"}, {"mtp_stats": {"enabled": False}}):
        with pytest.raises(EngineError, match="counts no drafts"):
            read_counters(**empty)


class Served:
    """An engine that speaks vLLM's or ATOM's counters, and is our closed loop inside."""

    def __init__(self, config, checkpoint, atom: bool):
        self.draft = load_draft(checkpoint).eval()
        self.verifier = HFVerifier(config.verifier.path, "float32", self.draft.spec.taps)
        self.frozen = FrozenVerifier.load(config.verifier.path, self.draft.fc.weight.dtype, self.draft.fc.weight.device)
        self.atom, self.distribution, self.lock = atom, Counter({0: 5}), threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/version":
            return httpx.Response(404) if self.atom else httpx.Response(200, json={"version": "0.32.0"})
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path == "/v1/completions":
            body = json.loads(request.content)
            with self.lock:
                (result,) = speculate(self.verifier, self.draft, self.frozen, [body["prompt"]], body["max_tokens"])
            self.distribution.update(result.accepted)
            return httpx.Response(200, json={"choices": [{"token_ids": result.response_ids}]})
        if request.url.path == "/debug/mtp_stats":
            stats = {"enabled": True, "distribution": {str(k): n for k, n in self.distribution.items()}}
            return httpx.Response(200, json=stats) if self.atom else httpx.Response(404)
        lines = [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self.distribution.total()}']
        for k in range(4):
            count = sum(n for accepted, n in self.distribution.items() if accepted > k)
            lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{k}"}} {count}')
        return httpx.Response(200, text="\n".join(lines))


@pytest.mark.parametrize(("atom", "concurrency"), [(False, 1), (True, 3)])
def test_a_served_engine_agrees_with_the_closed_loop(folder, tiny_verifier, monkeypatch, atom, concurrency):
    config = recipe(folder, tiny_verifier("llama"), engine="http://engine/", concurrency=concurrency)
    transport, client = httpx.MockTransport(Served(config, checkpoint_of(folder), atom)), httpx.Client
    monkeypatch.setattr(counters.httpx, "Client", lambda **kwargs: client(transport=transport, **kwargs))
    monkeypatch.setattr(counters, "SETTLED_S", 0)
    report = evaluate.evaluate(config, checkpoint_of(folder))
    assert report["engine_agreement"]["agree"] and len(set(report["engine_agreement"]["forwards"])) == 1
    theirs, ours = (report["readings"][name] for name in ("engine", "closed_loop"))
    assert theirs["tokens_per_forward"]["value"] == ours["tokens_per_forward"]["value"]
    assert theirs["histogram"] == ours["histogram"]
    assert report["protocol"]["engine"] == ("the one at http://engine/" if atom else "vLLM 0.32.0")
    assert len(report["records"]["engine"]) == (SAMPLES + concurrency - 1) // concurrency


def test_the_check_of_an_export_compares_an_engines_counters(folder, tiny_verifier, monkeypatch):
    config = recipe(folder, tiny_verifier("llama"))
    transport, client = httpx.MockTransport(Served(config, checkpoint_of(folder), atom=False)), httpx.Client
    monkeypatch.setattr(counters.httpx, "Client", lambda **kwargs: client(transport=transport, **kwargs))
    monkeypatch.setattr(counters, "SETTLED_S", 0)
    line = check_engine("http://engine", checkpoint_of(folder), config)
    theirs, ours = re.findall(r"\[[^]]*\]", line)
    assert theirs == ours and json.loads(ours)[0] > 0


def test_an_engine_that_is_not_there(folder, tiny_verifier):
    config = recipe(folder, tiny_verifier("llama"), engine="http://127.0.0.1:9")
    with pytest.raises(EngineError, match="ConnectError"):
        ask_engine(config, read_sets(config.evaluate.sets, None, 8), None, 4)


def test_temperatures_are_found_and_calibrate():
    random = np.random.default_rng(0)
    true = random.uniform(0.05, 0.95, (4000, 3))
    alive = (random.random((4000, 3)) < true).cumprod(1).astype(float)
    shown = logit(true) * [0.5, 2.0, 1.0]
    found = fit_temperatures(shown, alive, np.ones(4000))
    assert found == pytest.approx([0.5, 2.0, 1.0], rel=0.3)
    flat = alive.ravel(), np.ones(12000)
    assert ece(expit(shown / found).cumprod(1).ravel(), *flat) < 0.5 * ece(expit(shown).cumprod(1).ravel(), *flat)


def test_calibration_weighs_what_an_engine_visits_and_thresholds_cut():
    random = np.random.default_rng(1)
    responses = []
    for _ in range(40):
        true = random.uniform(0.05, 0.95, (30, 3))
        alive = (random.random((30, 3)) < true).cumprod(1).astype(float)
        responses.append(Response(alive, logit(true) * 3, np.zeros(0)))
    entry = calibration(responses)
    assert entry["ece"]["after"] < 0.6 * entry["ece"]["before"]
    drafts = [row["drafts_per_forward"] for row in entry["thresholds"]]
    tokens = [row["tokens_per_forward"] for row in entry["thresholds"]]
    assert drafts == sorted(drafts, reverse=True) and drafts[0] == 3
    assert tokens[0] == max(tokens) and tokens[2] > 0.9 * tokens[0]  # most of the gain at fewer drafts
    assert calibration(responses[:1]) == {}
