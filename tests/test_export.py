"""Exports: exact names, a config that engines read as we mean it, and logits that a second implementation computes alike."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from drafts import KINDS, random_draft, recipe, save_checkpoint
from in_process import InProcessPool, save_data
from safetensors.torch import load_file, save_file
from tiny import ROOT, python_environment

from configs.load import load
from configs.schema import Pool, Train
from extract.hf import HFVerifier
from store.contract import ContractMismatch
from train import loop
from train.checkpoint import latest, load_draft
from train.contract import DraftContract
from train.decode import speculate
from train.export import check, export
from train.formats import FormatError, describe, format_of, roster
from train.verifier import FrozenVerifier


@pytest.fixture(scope="module")
def exported(tiny_verifier, tmp_path_factory):
    """kind → (checkpoint, exported folder), each made once."""
    made = {}

    def make(kind: str):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            checkpoint = save_checkpoint(recipe(folder, tiny_verifier("llama"), kind))
            export(checkpoint, folder / "export", format_of(load_draft(checkpoint).spec), torch.float32)
            made[kind] = checkpoint, folder / "export"
        return made[kind]

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_computes_what_was_trained(exported, kind):
    checkpoint, folder = exported(kind)
    lines = check(folder, checkpoint)
    assert len(lines) == 2 and all("logits as the engine's" in line for line in lines)


@pytest.mark.parametrize("kind", ["full", "reduced", "mla"])
def test_a_published_draft_comes_back_with_its_contract(exported, kind):
    checkpoint, folder = exported(kind)
    trained, published = load_draft(checkpoint), load_draft(folder)
    assert published.spec.model_copy(update={"loss_terms": trained.spec.loss_terms}) == trained.spec
    for (name, ours), theirs in zip(trained.named_parameters(), published.parameters()):
        torch.testing.assert_close(theirs, ours / trained.tap_scale if name == "fc.weight" else ours)
    assert trained.kept is None or torch.equal(trained.kept, published.kept)


def test_names_and_shapes_of_a_gqa_file(exported):
    _, folder = exported("full")
    stored = load_file(folder / "model.safetensors")
    own = ("input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    own += ("self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    expected = {f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in own}
    expected |= {"fc.weight", "hidden_norm.weight", "norm.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    expected |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert stored.keys() == expected


def test_a_reduced_vocabulary_brings_its_own_head_and_maps(exported):
    checkpoint, folder = exported("reduced")
    tensors, kept = load_file(folder / "model.safetensors"), load_draft(checkpoint).kept
    assert torch.equal(torch.arange(100) + tensors["d2t"], kept) and tensors["t2d"].nonzero().flatten().equal(kept)
    assert tensors["lm_head.weight"].shape == (100, 64) and tensors["markov_head.markov_w2.weight"].shape == (100, 8)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool


def test_names_of_an_mla_file(exported):
    _, folder = exported("mla")
    names = load_file(folder / "model.safetensors").keys()
    assert {"context_proj.weight", "context_norm.weight", "final_norm.weight", "embed_tokens.weight"} <= names
    assert not any(name.startswith(("fc", "hidden_norm", "norm", "model", "lm_head")) for name in names) and len(names) == 2 * 12 + 8


def test_config_of_k3_dspark_says_what_loaders_need_and_nothing_that_misleads_them(exported):
    checkpoint, folder = exported("mla")
    config, spec = json.loads((folder / "config.json").read_text()), load_draft(checkpoint).spec
    assert config["target_layer_ids"] == [tap - 1 for tap in spec.taps] and config["num_target_layers"] == len(spec.taps)
    assert config["sample_from_anchor"] is True and config["mask_token_id"] == spec.mask_token_id
    assert config["rope_parameters"]["mscale_all_dim"] == config["rope_parameters"]["mscale"] == 1
    text = (folder / "config.json").read_text()
    assert "rope_interleave" not in text and "attention_factor" not in text
    assert config["target_num_hidden_layers"] == 4 and config["draft_vocab_size"] == config["vocab_size"]


@pytest.mark.parametrize(
    ("kind", "causal", "both_ways"), [("sliding", None, False), ("sliding_both_ways", False, True), ("causal", True, False)]
)
def test_config_of_speculators(exported, kind, causal, both_ways):
    _, folder = exported(kind)
    config = json.loads((folder / "config.json").read_text())
    layer = config["transformer_layer_config"]
    assert config["aux_hidden_state_layer_ids"] == [1, 2, 3] and config["sample_from_anchor"] is True
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == config["block_size"] == 4
    assert layer.get("is_causal") is causal and config["sliding_window_non_causal"] is both_ways
    assert layer["sliding_window"] == KINDS[kind].get("window") and layer["tie_word_embeddings"] is False


def edited(folder, tmp_path, change):
    """A copy of an export whose config went through `change`."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("full", lambda config: config["transformer_layer_config"].update(is_causal=True)),
        ("sliding", lambda config: config["transformer_layer_config"].update(sliding_window=7)),
        ("full", lambda config: config["transformer_layer_config"]["rope_parameters"].update(rope_theta=20000.0)),
        ("full", lambda config: config["transformer_layer_config"].update(rms_norm_eps=1e-2)),
        ("mla", lambda config: config["rope_parameters"].update(mscale=0.5, mscale_all_dim=0.5)),
        ("mla", lambda config: config["rope_parameters"].update(factor=8.0)),
    ],
)
def test_a_config_that_means_another_draft_is_noticed(exported, tmp_path, kind, change):
    checkpoint, folder = exported(kind)
    with pytest.raises(FormatError, match="relative L2"):
        check(edited(folder, tmp_path, change), checkpoint)


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("full", lambda config: config.pop("sample_from_anchor"), "sample_from_anchor"),
        ("mla", lambda config: config.update(rope_interleave=True), "rope_interleave"),
        ("mla", lambda config: config.update(num_target_layers=4), "num_target_layers"),
    ],
)
def test_a_config_that_engines_misread_is_refused(exported, tmp_path, kind, change, says):
    _, folder = exported(kind)
    with pytest.raises(ValueError, match=says):
        check(edited(folder, tmp_path, change))


def test_a_wrong_tensor_name_is_named_once(exported, tmp_path):
    _, folder = exported("mla")
    copy = shutil.copytree(folder, tmp_path / "copy")
    file = copy / "model.safetensors"
    save_file({name.replace("q_b_proj", "q_up_proj"): tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(FormatError, match=r"missing: layers.N.self_attn.q_b_proj.weight; unknown: layers.N.self_attn.q_up_proj.weight"):
        load_draft(copy)


def test_shards_and_bf16(tiny_verifier, tmp_path, monkeypatch):
    monkeypatch.setattr("train.export.SHARD_BYTES", 60_000)
    checkpoint = save_checkpoint(recipe(tmp_path, tiny_verifier("llama"), "mla"))
    export(checkpoint, tmp_path / "export", "k3_dspark")
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    stored = {name: tensor for file in files for name, tensor in load_file(tmp_path / "export" / file).items()}
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(tensor.dtype == torch.bfloat16 for tensor in stored.values())
    assert sum(tensor.nbytes for tensor in stored.values()) == index["metadata"]["total_size"]
    assert len(check(tmp_path / "export", checkpoint)) == 2
    assert "k3_dspark" not in (tmp_path / "export" / "README.md").read_text()  # tags say what a card's reader looks for
    assert "latent attention" in (tmp_path / "export" / "README.md").read_text()


def test_an_export_of_the_wrong_format_or_into_a_full_folder_is_refused(exported, tmp_path):
    checkpoint, folder = exported("full")
    with pytest.raises(FormatError, match="for the format speculators"):
        export(checkpoint, tmp_path / "new", "k3_dspark")
    with pytest.raises(FormatError, match="not empty"):
        export(checkpoint, folder, "speculators")
    assert not list(tmp_path.iterdir())


def test_the_command_exports_and_proves(exported, tmp_path):
    checkpoint, _ = exported("sliding")
    command = [sys.executable, "-m", "train.export", str(checkpoint), "--format", "speculators", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=python_environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("logits as the engine's within") == 2
    done = subprocess.run([*command[:3], "--check", str(tmp_path)], capture_output=True, text=True, env=python_environment(), cwd=ROOT)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "config.json" in done.stderr


def test_a_run_goes_on_from_a_published_draft(exported, tiny_verifier, tmp_path):
    _, folder = exported("sliding")
    config = recipe(tmp_path, tiny_verifier("llama"), "sliding", block_size=3)
    spec = DraftContract.resolve(config)
    draft = loop._draft(config, spec, folder)
    assert draft.spec == spec and torch.equal(draft.fc.weight, load_draft(folder).fc.weight)
    other = DraftContract.resolve(recipe(tmp_path, tiny_verifier("llama"), "sliding", window=9))
    with pytest.raises(ContractMismatch, match="window: 9 here, 6 there"):
        loop._draft(config, other, folder)


@pytest.mark.parametrize(
    ("name", "tensors", "trained", "exported"),
    [("kimi_k3", (62, 62), 2_396_090_241, 2_396_090_241), ("kimi_k3_mla", (67, 68), 2_387_907_841, 3_562_312_961)],
)
def test_f5_counts_of_both_k3_drafts(name, tensors, trained, exported):
    config = load(ROOT / "configs" / f"{name}.yaml", ["verifier.path=/nowhere"])
    lines = describe(spec := DraftContract.resolve(config)).splitlines()
    assert lines[-2] == f"{tensors[0]} tensors, {trained:,} parameters trained"
    assert lines[-1] == f"{tensors[1]} tensors, {exported:,} parameters in the {format_of(spec)} export"
    if name == "kimi_k3_mla":
        names = roster(spec)
        assert names["layers.4.self_attn.kv_b_proj.weight"] == (16384, 512) and names["context_proj.weight"] == (7168, 35840)
        assert sum(torch.Size(shape).numel() for key, shape in names.items() if key.startswith("layers.0.")) == 409_419_776


def test_a_draft_of_another_seed_is_noticed(exported, tiny_verifier, tmp_path):
    """The tolerance means something: other weights of the same shapes are far outside of it."""
    other = save_checkpoint(recipe(tmp_path, tiny_verifier("llama"), "full"), seed=1)
    with pytest.raises(FormatError, match="relative L2"):
        check(exported("full")[1], other)
    assert random_draft(load_draft(other).spec, 1).fc.weight.equal(load_draft(other).fc.weight)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["mixed", "reduced", "mla"])
def test_trained_exported_and_decoded_alike(tiny_verifier, tmp_path, monkeypatch, kind):
    """From training to a published folder that goes on training and drafts the same tokens, block for block."""
    verifier_path = tiny_verifier("llama")
    init = {"taps": "scaled", "projection": "last_tap", "markov": "bigram"}
    train = {"epochs": 3, "global_batch": 2, "num_anchors": 8, "optimizer": "adamw", "lr": 3e-3}
    config = recipe(tmp_path, verifier_path, kind, init=init).model_copy(update={"train": Train(**train), "pool": Pool(in_flight=1)})
    verifier = HFVerifier(verifier_path, "float32", config.draft.taps)
    rollouts = [json.loads(line) for line in save_data(config, verifier, 3).read_text().splitlines()]
    if kind == "reduced":
        said = np.unique(np.concatenate([row["response_ids"] for row in rollouts]))
        rest = np.setdiff1d(np.arange(verifier.vocab_size), said)
        np.save(config.data.path / "draft_vocabulary.npy", np.sort(np.r_[said, rest[: 100 - len(said)]]))
    monkeypatch.setattr(loop, "Pool", InProcessPool)
    loop.train(config)
    checkpoint = latest(config.run_dir / "checkpoints")
    export(checkpoint, tmp_path / "export", format_of(load_draft(checkpoint).spec), torch.float32)
    assert len(check(tmp_path / "export", checkpoint)) == 2

    decoded = []
    for draft in (load_draft(checkpoint), load_draft(tmp_path / "export")):
        frozen = FrozenVerifier.load(verifier_path, torch.float32, torch.device("cpu"), draft.kept)
        decoded.append(speculate(verifier, draft, frozen, [row["prompt_ids"] for row in rollouts], 24))
    assert [result.accepted for result in decoded[0]] == [result.accepted for result in decoded[1]]
    assert [result.response_ids for result in decoded[0]] == [row["response_ids"] for row in rollouts]
    if kind != "mla":  # six steps are too few for layers that nothing warm-starts
        assert max(max(result.accepted) for result in decoded[0]) >= 1

    again = config.model_copy(update={"run_dir": tmp_path / "again", "train": Train(**train | {"max_steps": 1, "lr": 1e-9})})
    loop.train(again, from_draft=tmp_path / "export")
    torch.testing.assert_close(load_draft(latest(again.run_dir / "checkpoints")).norm.weight, load_draft(checkpoint).norm.weight)
