"""The two published formats of a draft, `speculators` (GQA decoders) and `k3_dspark` (MLA decoders): the exact set of tensor
names, and config.json, written by hand. Engines ignore or misread what they do not expect, without a word."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch
from torch import Tensor

from configs.command import PlainError
from train.contract import DraftContract
from train.draft import Draft

K3_NAMES = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}


class FormatError(PlainError, ValueError):
    """A draft that a format cannot hold, or a folder that is not a draft we can read; the message is one line."""


def format_of(spec: DraftContract) -> str:
    return "k3_dspark" if spec.mla else "speculators"


def roster(spec: DraftContract) -> dict[str, tuple[int, ...]]:
    """Every tensor of the draft's exported file, and no other: name to shape."""
    with torch.device("meta"):
        shapes = {file_name(spec, name): tuple(parameter.shape) for name, parameter in Draft(spec).named_parameters()}
    if spec.mla:
        shapes["embed_tokens.weight"] = (spec.vocab_size, spec.hidden_size)
    elif spec.reduced:
        shapes["lm_head.weight"] = (spec.draft_vocab_size, spec.hidden_size)
        shapes |= {"d2t": (spec.draft_vocab_size,), "t2d": (spec.vocab_size,)}
    return shapes


def file_name(spec: DraftContract, name: str) -> str:
    """What the file calls our parameter `name`."""
    if spec.mla:
        for ours, theirs in K3_NAMES.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
    return name


def to_file(draft: Draft, embedding: Tensor, head: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The file's tensors. embedding [V, H], head [V, H]: the verifier's. The scale of the taps goes into the projection."""
    spec = draft.spec
    tensors = {file_name(spec, name): parameter.detach() for name, parameter in draft.named_parameters()}
    projection = file_name(spec, "fc.weight")
    tensors[projection] = tensors[projection] / draft.tap_scale
    if spec.mla:
        tensors["embed_tokens.weight"] = embedding
    elif spec.reduced:
        tensors["lm_head.weight"] = head[draft.kept]
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    if spec.reduced:
        tensors["d2t"] = draft.kept - torch.arange(len(draft.kept))
        tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill(0, draft.kept, True)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != roster(spec):
        raise FormatError(f"{format_of(spec)}: {names_differ(roster(spec), shapes) or 'a tensor has the wrong shape'}")
    return tensors


def config_json(spec: DraftContract, name: str, verifier: dict, dtype: str) -> dict:
    """config.json of the exported draft of the verifier `name`, whose own config.json is `verifier`, nested or not."""
    text = verifier.get("text_config", verifier)
    shared = {
        "tie_word_embeddings": False,
        "block_size": spec.block_size,
        "sample_from_anchor": True,  # engines take a missing key for false, and shift every slot by one
        "mask_token_id": spec.mask_token_id,
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.hidden_size,
        "markov_rank": spec.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    layer = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "vocab_size": spec.vocab_size,
        "attention_bias": False,
        **{key: text.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if spec.mla:
        return _k3(spec, text["num_hidden_layers"], {"torch_dtype": dtype} | shared | layer)
    served_with = {"name_or_path": name, "architectures": verifier.get("architectures") or []}
    return _speculators(spec, served_with, {"dtype": dtype} | shared, layer)


def _speculators(spec: DraftContract, verifier: dict, shared: dict, layer: dict) -> dict:
    proposal = {"proposal_type": "greedy", "speculative_tokens": spec.block_size, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    sliding = "sliding_attention" in spec.layer_types
    decoder = {
        "model_type": "qwen3",
        **layer,
        "num_attention_heads": spec.gqa.heads,
        "num_key_value_heads": spec.gqa.kv_heads,
        "head_dim": spec.gqa.head_dim,
        "layer_types": list(spec.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": spec.window,
        "rope_theta": spec.gqa.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.gqa.rope_theta},
        "tie_word_embeddings": False,
    }
    if spec.causal is not None:  # where it is open, engines decide by the layer's type, as `DraftContract.reach` does
        decoder["is_causal"] = spec.causal
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        **shared,
        "aux_hidden_state_layer_ids": list(spec.taps),
        "sliding_window_non_causal": sliding and spec.causal is False,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": decoder,
    }


def _k3(spec: DraftContract, verifier_layers: int, shared: dict) -> dict:
    mla = spec.mla
    rope = {"rope_type": "default", "rope_theta": mla.rope_theta}
    if mla.yarn:
        rope = {"rope_type": "yarn", "rope_theta": mla.rope_theta} | mla.yarn.model_dump() | {"mscale_all_dim": mla.yarn.mscale}
    # `rope_interleave` must not appear: one engine takes it for the other pairing. Nor may `attention_factor`.
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        **shared,
        "num_attention_heads": mla.heads,
        "num_key_value_heads": mla.heads,
        **mla.model_dump(include={"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_theta"}),
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "rope_parameters": rope,
        "target_layer_ids": [tap - 1 for tap in spec.taps],  # outputs of layers
        "num_target_layers": len(spec.taps),
        "target_num_hidden_layers": verifier_layers,
    }


def names_differ(expected: Iterable[str], found: Iterable[str]) -> str | None:
    """Tensor names on one side only, the numbers of layers left out so that a name that is wrong in all of them shows once."""
    sides = (("missing", set(expected) - set(found)), ("unknown", set(found) - set(expected)))
    short = ((word, sorted({re.sub(r"\d+", "N", name) for name in names})) for word, names in sides)
    return "; ".join(f"{word}: {', '.join(names)}" for word, names in short if names) or None


def describe(spec: DraftContract) -> str:
    """Every tensor that is trained with its shape, and the totals: trained, and in the exported file. Nothing is allocated."""
    with torch.device("meta"):
        trained = {name: tuple(parameter.shape) for name, parameter in Draft(spec).named_parameters()}
    lines = [f"{name:<52} {list(shape)!s:>18} {math.prod(shape):>15,}" for name, shape in trained.items()]
    for what, shapes in (("trained", trained), (f"in the {format_of(spec)} export", roster(spec))):
        lines.append(f"{len(shapes)} tensors, {sum(map(math.prod, shapes.values())):,} parameters {what}")
    return "\n".join(lines)
