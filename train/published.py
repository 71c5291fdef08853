"""A published draft of either format, ours or another's, read back into a `Draft`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from configs.schema import Gqa, Mla, Yarn
from store.verifier import tensor_index
from train.contract import DraftContract
from train.draft import Draft
from train.formats import FormatError, file_name, names_differ, roster

ALWAYS = {"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}


def read_published(folder: Path) -> Draft:
    """A draft of either format. Raises FormatError: not such a folder, other names or shapes, a variant that we do not train."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise FormatError(f"{folder}: config.json cannot be read ({error})") from None
    try:
        spec = _read_k3(config) if config.get("model_type") == "k3_dspark" else _read_speculators(config)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{folder}/config.json: not a draft that we can train ({type(error).__name__}: {error})") from None
    index = tensor_index(folder)
    if names := names_differ(roster(spec), index):
        raise FormatError(f"{folder}: tensors {names}")
    draft = Draft(spec)
    parameters = {file_name(spec, name): parameter for name, parameter in draft.named_parameters()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_tensor(index[name], name, parameter.shape))
        if spec.reduced:
            draft.kept.copy_(_tensor(index["d2t"], "d2t", draft.kept.shape) + torch.arange(len(draft.kept)))
    return draft


def _read_speculators(config: dict) -> DraftContract:
    layer = config["transformer_layer_config"]
    _require(config, {"speculators_model_type": "dspark", "sample_from_anchor": True} | ALWAYS)
    _require(layer, {"model_type": "qwen3", "hidden_act": "silu"})
    rope = layer.get("rope_parameters") or {"rope_theta": layer.get("rope_theta", 10000.0)}
    _require({"rope_type": "default"} | rope, {"rope_type": "default"})
    types = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
    causal = layer.get("is_causal")
    if causal is None and config.get("sliding_window_non_causal"):
        raise ValueError("sliding_window_non_causal without is_causal: trained one way and served another")
    return DraftContract(
        **_read_shared(config, layer),
        taps=tuple(config["aux_hidden_state_layer_ids"]),
        layer_types=tuple(types),
        window=layer["sliding_window"] if "sliding_attention" in types else None,
        causal=causal,
        draft_vocab_size=config.get("draft_vocab_size") or layer["vocab_size"],
        gqa=Gqa(
            heads=layer["num_attention_heads"],
            kv_heads=layer["num_key_value_heads"],
            head_dim=layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"],
            rope_theta=rope["rope_theta"],
        ),
    )


def _read_k3(config: dict) -> DraftContract:
    _require(config, ALWAYS)
    usual = {"sample_from_anchor": True, "mla_use_nope": False, "mla_use_output_gate": False}  # where they are missing, too
    _require(usual | config, usual | {"rope_interleave": None})
    rope, yarn = config["rope_parameters"], None
    if rope["rope_type"] == "yarn":
        _require(rope, {"mscale": rope["mscale_all_dim"], "attention_factor": None})
        yarn = Yarn(**{key: rope[key] for key in Yarn.model_fields})
    shapes = {key: config[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    return DraftContract(
        **_read_shared(config, config),
        taps=tuple(output + 1 for output in config["target_layer_ids"]),
        layer_types=("full_attention",) * config["num_hidden_layers"],
        draft_vocab_size=config["vocab_size"],
        mla=Mla(heads=config["num_attention_heads"], rope_theta=rope["rope_theta"], yarn=yarn, **shapes),
    )


def _read_shared(config: dict, layer: dict) -> dict:
    """Fields that both formats spell alike. The loss is not published; the block size is not always (the K3 drafts have 7)."""
    keys = ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings")
    return {
        "block_size": config.get("block_size") or 7,
        "mask_token_id": config["mask_token_id"],
        "markov_rank": config["markov_rank"],
        "loss_terms": {},
        **{key: layer[key] for key in keys},
    }


def _require(config: dict, expected: dict) -> None:
    for key, value in expected.items():
        if config.get(key) != value:
            raise ValueError(f"{key} is {config.get(key)!r}, not {value!r}")


def _tensor(file: Path, name: str, shape: torch.Size) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        tensor = tensors.get_tensor(name)
    if tensor.shape != shape:
        raise FormatError(f"{file}: {name} is {list(tensor.shape)}, not {list(shape)}")
    return tensor
