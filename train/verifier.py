"""The three tensors of the verifier that training needs: embedding, final norm, output head, read by index from the
safetensors files. The model itself is never built."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from store.verifier import find_file, tensor_index, text_config
from train.heads import Heads

# Families whose norms multiply by 1 + weight.
ONE_PLUS_WEIGHT = re.compile(r"(recurrent_|vault)?gemma[23]?(_text)?|qwen3_(next|5(_moe)?)(_text)?")


def read_tensor(path: str, pattern: str) -> Tensor | None:
    """The one tensor of a verifier whose name ends with the regular expression `pattern`, whatever prefix nests it.

    None if there is none; ValueError if several match.
    """
    index = tensor_index(path)
    names = [name for name in index if re.search(rf"(^|\.){pattern}$", name)]
    if len(names) > 1:
        raise ValueError(f"{path}: {len(names)} tensors match {pattern}: {', '.join(sorted(names)[:3])}")
    if not names:
        return None
    with safe_open(find_file(path, index[names[0]].name), framework="pt") as file:
        return file.get_tensor(names[0])


@dataclass
class FrozenVerifier:
    """embedding [V, H], final norm [H] with the verifier's own eps (LayerNorm where `centred`), and the heads (on the
    embedding itself where tied).

    `last` says whether the states that it is given are from before or after the final norm (the state contract's field)."""

    embedding: Tensor
    norm: Tensor
    eps: float
    heads: Heads
    centred: bool = False
    last: Literal["pre_norm", "post_norm"] = "pre_norm"

    @classmethod
    def load(cls, path: str, dtype: torch.dtype, device: torch.device, kept: Tensor | None = None) -> FrozenVerifier:
        """kept [Vd]: token ids of a reduced draft vocabulary. Raises ValueError naming the tensor that the checkpoint lacks."""
        config = text_config(path)
        embedding = read_tensor(path, r"(embed_tokens|wte|embed_in)\.weight")
        norm = read_tensor(path, r"model\.(norm|final_layernorm)\.weight")
        head = read_tensor(path, r"lm_head\.weight")
        if head is None and config.get("tie_word_embeddings", True):
            head = embedding
        for name, tensor in (("embedding", embedding), ("final norm", norm), ("output head", head)):
            if tensor is None:
                raise ValueError(f"{path}: no {name} among its {len(tensor_index(path))} tensors")
        embedding = embedding.to(device, dtype)
        head = embedding if head.shape == embedding.shape and config.get("tie_word_embeddings") else head.to(device, dtype)
        norm = norm.to(device, torch.float32) + bool(ONE_PLUS_WEIGHT.fullmatch(config.get("model_type", "")))
        heads = Heads(head, logit_scale(config), config.get("final_logit_softcapping"), None if kept is None else kept.to(device))
        eps = config.get("rms_norm_eps", config.get("layer_norm_eps"))
        return cls(embedding, norm, eps, heads, centred="rms_norm_eps" not in config)

    def final_norm(self, last: Tensor) -> Tensor:
        """Last states [..., H] → what the head reads; in fp32 at least."""
        x = last.to(torch.promote_types(last.dtype, torch.float32))
        if self.last == "post_norm":
            return x
        return (F.layer_norm if self.centred else F.rms_norm)(x, self.norm.shape, self.norm.to(x.dtype), eps=self.eps)

    def logits(self, last: Tensor) -> Tensor:
        """Last states [..., H] → logits [..., V]."""
        return self.heads.teacher_logits(self.final_norm(last))

    def slot_embeddings(self, tokens: Tensor, mask_token_id: int, block_size: int) -> Tensor:
        """Inputs [A, B, H] of blocks whose anchors are tokens [A]: slot 0 holds the anchor, the others the mask token."""
        mask = self.embedding[mask_token_id].expand(len(tokens), block_size - 1, -1)
        return torch.cat((self.embedding[tokens][:, None], mask), 1).float()


def logit_scale(config: dict) -> float:
    """What a verifier multiplies its logits by, before any soft-cap: several families do, each by a key of its own."""
    if "logits_scaling" in config:  # Granite divides
        return config["logits_scaling"] if config.get("model_type") == "hyperclovax" else 1 / config["logits_scaling"]
    if "dim_model_base" in config:  # MiniCPM
        return config["dim_model_base"] / config["hidden_size"]
    return config.get("logit_scale") or config.get("lm_head_multiplier") or 1.0  # Cohere; Falcon-H1
