"""Training as a whole, in the test's own process: exactness over ranks, micro-steps and restarts, and what a run refuses."""

from __future__ import annotations

import json
import os
import shutil
import socket
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from datasets import load_from_disk
from in_process import InProcessPool, greedy, save_data
from safetensors.torch import load_file
from tiny import ROOT, write_recipe

from configs.load import load
from configs.schema import Config
from extract.hf import HFVerifier
from extract.obtain import NoStates
from extract.pool import ExtractionError
from store.contract import ContractMismatch
from store.objects import open_store
from train import checkpoint, loop
from train.batch import place, total_steps
from train.contract import DraftContract
from train.decode import speculate
from train.draft import Draft
from train.formats import describe
from train.optimizer import _cost, share_out
from train.verifier import FrozenVerifier

SAMPLES = 5  # in steps of 2: the last step of an epoch leaves the second of two ranks without a sample
TRAIN = {"epochs": 3, "global_batch": 2, "num_anchors": 6, "optimizer": "muon", "lr": 3e-3, "checkpoint_every": 3, "log_every": 1}


@pytest.fixture(scope="module")
def data(tiny_verifier, tmp_path_factory):
    """A folder with a data set of SAMPLES rollouts and a cache that every run of the module shares."""
    folder = tmp_path_factory.mktemp("training")
    config = recipe(folder, tiny_verifier("llama"))
    save_data(config, HFVerifier(config.verifier.path, "float32", config.draft.taps), SAMPLES)
    load_from_disk(config.data.path).save_to_disk(config.data.path / "validation")
    return folder


def recipe(folder: Path, verifier: Path, name: str = "run", loss: dict | None = None, **train) -> Config:
    overrides = {
        "run_dir": str(folder / name),
        "store": {"path": str(folder / "store"), "bytes": 4_000_000, "keep": True, "cache_path": str(folder / "cache")},
        "pool": {"in_flight": 1},
        "loss": {"chunk_bytes": 200_000} | (loss or {}),
        "train": {**TRAIN, **train},
        "evaluate": {"rule": "standard"},  # of validation and of walks: every probability counts
    }
    return load(write_recipe(folder / "recipes" / name, verifier, overrides | {"data": {"path": str(folder / "data"), "length": 400}}))


def changed(config: Config, **sections) -> Config:
    """The recipe with other values: changed(config, pool={"attempts": 2})."""
    return config.model_copy(update={name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()})


def run(config: Config, monkeypatch, **pool) -> dict[int, dict]:
    """Train in this process; returns the log's lines by step, the later one where there are two."""
    monkeypatch.setattr(loop, "Pool", lambda config: InProcessPool(config, **pool))
    loop.train(config)
    return curve(config)


def curve(config: Config, log: str = "metrics.jsonl") -> dict[int, dict]:
    lines = (config.run_dir / log).read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}


def weights(config: Config) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.latest(config.run_dir / "checkpoints") / "draft.safetensors")


def test_a_run_learns_and_its_log_is_whole(data, tiny_verifier, monkeypatch):
    config = recipe(data, tiny_verifier("llama"), "learns", epochs=12, lr=1e-2)
    lines = run(config, monkeypatch)
    assert sorted(lines) == list(range(1, total_steps(SAMPLES, config) + 1))
    assert lines[36]["loss"] < 0.85 * lines[1]["loss"]
    assert {"fetch", "forward", "backward", "optimizer"} == lines[1]["seconds"].keys()
    assert open_store(config.store).usage().keys == 0, "streaming objects are gone once used"


@pytest.mark.parametrize("anchors", ["uniform", "walk"])
def test_resumed_equals_not_stopped_bit_for_bit(data, tiny_verifier, monkeypatch, anchors):
    names = f"whole_{anchors}", f"stopped_{anchors}"
    whole, stopped = (recipe(data, tiny_verifier("llama"), name, anchors=anchors) for name in names)
    expected = run(whole, monkeypatch)
    save = checkpoint.save

    def save_and_stop(root, step, *args):
        save(root, step, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(checkpoint, "save", save_and_stop)
        run(stopped, interrupted)
    assert max(curve(stopped)) == 3
    resumed = run(stopped, monkeypatch)
    for step, line in expected.items():
        timing = {"seconds": 0, "retries": 0, "store": 0}
        assert {**resumed[step], **timing} == {**line, **timing}
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(stopped)[name]), name


def test_accumulation_equals_none(data, tiny_verifier, monkeypatch):
    packed = run(recipe(data, tiny_verifier("llama"), "packed", micro_tokens=1000), monkeypatch)
    single = run(recipe(data, tiny_verifier("llama"), "single", micro_tokens=1), monkeypatch)
    assert packed.keys() == single.keys()
    for step, line in packed.items():
        assert single[step]["loss"] == pytest.approx(line["loss"], rel=1e-5)
        assert single[step]["slots"] == line["slots"]


def _rank(rank: int, size: int, port: int, path: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    loop.Pool = InProcessPool
    loop.train(load(path))


def run_ranks(data: Path, config: Config, size: int) -> dict[int, dict]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mp.spawn(_rank, (size, port, data / "recipes" / config.run_dir.name / "recipe.yaml"), nprocs=size)
    return curve(config)


def assert_same_run(ours: Config, theirs: Config) -> None:
    expected = curve(theirs)
    assert curve(ours).keys() == expected.keys()
    for step, line in curve(ours).items():
        assert line["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5)
        assert (line["slots"], line["samples"]) == (expected[step]["slots"], expected[step]["samples"])
    for name, tensor in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], tensor, rtol=1e-3, atol=1e-5)
    held_out, expected = curve(ours, "validation.jsonl"), curve(theirs, "validation.jsonl")
    assert held_out.keys() == expected.keys()
    for step, record in held_out.items():
        for name, value in record.items():
            assert value == pytest.approx(expected[step][name], rel=1e-5)
    assert expected[max(expected)]["tokens_per_forward"] > 1.001


@pytest.mark.integration
@pytest.mark.parametrize(
    ("parallel", "ranks", "anchors", "term"), [("ddp", 2, "walk", "ce"), ("fsdp", 2, "uniform", "l1"), ("fsdp", 3, "walk", "ce")]
)
def test_many_ranks_equal_one_and_another_number_goes_on(data, tiny_verifier, monkeypatch, parallel, ranks, anchors, term):
    """Steps of 3 and 2 samples, one a micro-step: some ranks have less to do than others, or nothing. Validation is shared out, too.

    On walks the loss is smooth: l1 has a kink at p = q, where rounding turns the gradient of a token around.
    """
    names = f"alone_{parallel}{ranks}", f"{parallel}{ranks}"
    keys = {"parallel": parallel, "anchors": anchors, "global_batch": 3, "micro_tokens": 1, "validate_every": 3}
    keys["loss"] = {"terms": {term: 1.0}}
    alone, many = (recipe(data, tiny_verifier("llama"), name, **keys) for name in names)
    run(alone, monkeypatch)
    run_ranks(data, many, ranks)
    assert_same_run(many, alone)
    (many.run_dir / "checkpoints" / "latest").write_text("step_00000003")
    run(many, monkeypatch)
    assert_same_run(many, alone)


def test_muon_shares_out_each_matrix_once_and_evenly():
    with torch.device("meta"):
        draft = Draft(DraftContract.resolve(load(ROOT / "configs" / "kimi_k3.yaml", ["verifier.path=/nowhere"])))
    matrices = [matrix for name, matrix in draft.named_parameters() if matrix.dim() == 2 and "markov" not in name]
    rounds = share_out(matrices, 4)
    assert sorted(id(matrix) for matrix in chain(*rounds) if matrix is not None) == sorted(map(id, matrices))
    loads = [sum(_cost(matrix) for matrix in mine if matrix is not None) for mine in zip(*rounds)]
    assert max(loads) < 1.1 * min(loads)


def test_the_newest_checkpoints_stay_and_what_was_cut_short_is_none(data, tiny_verifier, monkeypatch):
    config = recipe(data, tiny_verifier("llama"), "kept", checkpoint_every=1, keep_checkpoints=2)
    cut = config.run_dir / "checkpoints" / ".step_00000007"
    cut.mkdir(parents=True)
    run(config, monkeypatch)
    assert sorted(path.name for path in cut.parent.iterdir()) == ["latest", "step_00000008", "step_00000009"]


def test_other_data_is_refused_with_what_differs(data, tiny_verifier, monkeypatch, tmp_path):
    config = recipe(data, tiny_verifier("llama"), "moved", epochs=1)
    run(config, monkeypatch)
    rows = load_from_disk(str(config.data.path))
    rows.select(range(1, SAMPLES)).save_to_disk(str(tmp_path / "fewer"))
    shutil.copy(config.data.path / "data_contract.json", tmp_path / "fewer")
    with pytest.raises(ContractMismatch, match=r"order contract: content: .*; rows: 4 here, 5 there"):
        run(changed(config, data={"path": tmp_path / "fewer"}), monkeypatch)


def shift_last(states):
    """The last state is the output of the layer before the last one."""
    return torch.cat((states[:, :-1], states[:, -2:-1]), 1)


def test_handshake_refuses_and_says_which(data, tiny_verifier, monkeypatch):
    config = recipe(data, tiny_verifier("llama"), "refused")
    frozen = FrozenVerifier.load(config.verifier.path, torch.float32, torch.device("cpu"))

    def normed(states):
        return torch.cat((states[:, :-1], frozen.final_norm(states[:, -1:])), 1)

    with pytest.raises(ContractMismatch, match="wrong last layer"):
        run(config, monkeypatch, distort=shift_last)
    with pytest.raises(ContractMismatch, match="wrong norm flag: the engine says its last state is pre_norm, but it is post_norm"):
        run(config, monkeypatch, distort=normed)
    other, fewer = recipe(data, tiny_verifier("qwen3"), "other_verifier"), changed(config, draft={"taps": (1, 2)})
    monkeypatch.setattr(loop, "Pool", lambda _: InProcessPool(other))
    with pytest.raises(ContractMismatch, match="another verifier"):
        loop.train(config)
    monkeypatch.setattr(loop, "Pool", lambda _: InProcessPool(fewer))
    with pytest.raises(ContractMismatch, match=r"taps: \(1, 2\) in the engine, \(1, 2, 3\) in the recipe"):
        loop.train(config)
    assert not (config.run_dir / "metrics.jsonl").exists() and open_store(config.store).usage().keys == 0


def test_a_sample_that_cannot_be_made_costs_itself_alone(data, tiny_verifier, monkeypatch):
    config = recipe(data, tiny_verifier("llama"), "bad", epochs=1)
    config = changed(config, store={"cache_path": data / "cache_of_bad"}, pool={"attempts": 2})
    order = [int(row) for step in range(3) for row in place(step, SAMPLES, config).rows]
    bad = load_from_disk(str(config.data.path))[order[-1]]["input_ids"]  # alone in the last step: that step has no sample at all
    lines = run(config, monkeypatch, bad=(tuple(bad),))
    assert [lines[step]["samples"] for step in (1, 2, 3)] == [2, 2, 0]
    assert lines[3]["drops"] == {"non_finite": 1} and lines[3]["loss"] == 0


def test_an_extractor_that_makes_nothing_ends_the_run_with_its_reason(data, tiny_verifier, monkeypatch):
    config = changed(recipe(data, tiny_verifier("llama"), "dead"), store={"keep": False}, pool={"attempts": 2, "deadline_s": 0.2})

    class Dead(InProcessPool):
        def make(self, name, token_ids):
            if len(token_ids) > 36:  # longer than any row of the data: the handshake's
                return super().make(name, token_ids)
            raise ExtractionError("unreachable", "http://127.0.0.1:1: connection refused")

    monkeypatch.setattr(loop, "Pool", Dead)
    with pytest.raises(NoStates, match=r"attempts failed, the last one: unreachable: http://127.0.0.1:1: connection refused"):
        loop.train(config)


def test_a_checkpoint_of_another_draft_is_refused(data, tiny_verifier, monkeypatch):
    run(recipe(data, tiny_verifier("llama"), "other", epochs=1), monkeypatch)
    longer = changed(recipe(data, tiny_verifier("llama"), "other", epochs=1), draft={"block_size": 5})
    with pytest.raises(ContractMismatch, match="draft contract: block_size: 5 here, 4 there"):
        run(longer, monkeypatch)


def test_every_sample_is_seen_once_an_epoch_whatever_the_ranks(data, tiny_verifier):
    config = recipe(data, tiny_verifier("llama"))
    per_epoch = total_steps(SAMPLES, config) // config.train.epochs
    rows = [[int(row) for row in place(step, SAMPLES, config).rows] for step in range(3 * per_epoch)]
    epochs = [list(chain(*rows[first : first + per_epoch])) for first in range(0, len(rows), per_epoch)]
    assert all(sorted(rows) == list(range(SAMPLES)) for rows in epochs)
    assert any(one != other for one, other in pairwise(epochs))


@pytest.mark.integration
def test_one_sample_trained_to_death_is_accepted_whole(tiny_verifier, tmp_path, monkeypatch):
    """A strong test of alignment: any shift of labels, positions, mask or Markov token keeps this far below the block."""
    train = {"epochs": 120, "global_batch": 1, "num_anchors": 127, "lr": 2e-3, "muon": {"lr": 2e-2}, "checkpoint_every": 1000}
    path = tiny_verifier("llama")
    config = recipe(tmp_path, path, "death", **train)
    config = changed(config, draft={"block_size": 8, "layers": 2, "markov_rank": 16})
    verifier = HFVerifier(path, "float32", config.draft.taps)
    rollouts = [json.loads(line) for line in save_data(config, verifier, 1, response=128).read_text().splitlines()]
    run(config, monkeypatch)
    draft = checkpoint.load_draft(checkpoint.latest(config.run_dir / "checkpoints"))
    frozen = FrozenVerifier.load(path, torch.float32, torch.device("cpu"))
    result = speculate(verifier, draft, frozen, [rollouts[0]["prompt_ids"]], 128)[0]
    accepted = result.accepted[:-1]  # the text ends inside the last block
    assert sum(accepted) / len(accepted) >= 7.5, accepted
    assert result.response_ids == greedy(verifier, rollouts[0]["prompt_ids"], 128)


def test_describe_counts_without_a_verifier(tiny_verifier, tmp_path):
    config = recipe(tmp_path, tiny_verifier("llama"))
    assert describe(DraftContract.resolve(config)).splitlines()[-2] == "18 tensors, 78,217 parameters trained"
