"""The files of a verifier, in every form in which they come."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from store.verifier import VerifierError, find_file, fingerprint, tensor_index, text_config

CONFIG = {"model_type": "llama", "hidden_size": 8, "_name_or_path": "somewhere", "transformers_version": "5.0"}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.{layer}.{kind}.weight": torch.randn(64, 64, generator=generator) for layer in range(3) for kind in ("q", "up")
    }
    return tensors | {"model.norm.weight": torch.randn(8, generator=generator), "model.embed_tokens.weight": torch.randn(100, 64)}


def folder(path, tensors, shards: int = 1, config: dict = CONFIG):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names = {name: f"model-{n % shards:05}-of-{shards:05}.safetensors" for n, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    return path


@pytest.mark.parametrize("shards", [1, 3])
def test_tensor_index(tmp_path, shards):
    path, tensors = folder(tmp_path / "v", weights(), shards), weights()
    index = tensor_index(path)
    assert index.keys() == tensors.keys() and len(set(index.values())) == shards
    assert all(file.is_file() and file.parent == path for file in index.values())
    assert find_file(path, "nothing.json") is None and find_file(str(path), "config.json") == path / "config.json"


def test_text_config(tmp_path):
    assert text_config(folder(tmp_path / "flat", {}))["hidden_size"] == 8
    assert text_config(folder(tmp_path / "nested", {}, config={"text_config": {"hidden_size": 9}, "vision_config": {}})) == {
        "hidden_size": 9
    }


@pytest.mark.parametrize("shards", [1, 3])
def test_fingerprint_is_of_content(tmp_path, shards):
    tensors = weights()
    original = fingerprint(folder(tmp_path / "a", tensors, shards))
    shutil.copytree(tmp_path / "a", tmp_path / "copy under another name")
    assert fingerprint(tmp_path / "copy under another name") == original
    elsewhere = CONFIG | {"_name_or_path": "elsewhere", "transformers_version": "5.1"}
    assert fingerprint(folder(tmp_path / "b", tensors, shards, elsewhere)) == original
    assert fingerprint(folder(tmp_path / "c", tensors, shards, CONFIG | {"rope_theta": 1.0})) != original
    for n, name in enumerate(tensors):  # a fine-tune of any single tensor, same shapes
        tuned = {key: value + 1e-3 if key == name else value for key, value in tensors.items()}
        assert fingerprint(folder(tmp_path / f"tuned{n}", tuned, shards)) != original, name


def test_fingerprint_of_experts_is_a_sample(tmp_path):
    experts = {f"model.layers.0.mlp.experts.{n}.up.weight": torch.full((2, 2), float(n)) for n in range(300)}
    gate = {"model.layers.0.mlp.gate.weight": torch.ones(4, 4)}
    original = fingerprint(folder(tmp_path / "a", experts | gate))
    assert fingerprint(folder(tmp_path / "b", {name: value + 1 for name, value in experts.items()} | gate)) != original
    assert fingerprint(folder(tmp_path / "c", experts | {name: value + 1 for name, value in gate.items()})) != original


def test_what_is_missing_is_said_in_one_line(tmp_path):
    with pytest.raises(VerifierError, match=r"^models/not/here: no such folder"):
        text_config("models/not/here")
    with pytest.raises(VerifierError, match="no such folder"):
        fingerprint(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(VerifierError, match=r"has no config\.json"):
        text_config(tmp_path / "empty")
    with pytest.raises(VerifierError, match=r"has no model\.safetensors"):
        tensor_index(tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"not at all what it says")
    with pytest.raises(VerifierError, match="not a safetensors file"):
        tensor_index(tmp_path / "empty")


def test_a_hub_id_that_cannot_be_reached(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(repo, name):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(VerifierError, match=r"^some/model: no such folder, and the hub cannot be reached for config\.json$"):
        text_config("some/model")
