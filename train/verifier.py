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
    """embedding [V, H], final norm [H] with the verifier's own eps, head [V, H] (the embedding itself where tied).

    `last` says whether the states that it is given are from before or after the final norm (the state contract's field)."""

    embedding: Tensor
    norm: Tensor
    eps: float
    head: Tensor
    last: Literal["pre_norm", "post_norm"] = "pre_norm"

    @classmethod
    def load(cls, path: str, dtype: torch.dtype, device: torch.device) -> FrozenVerifier:
        """Raises ValueError naming the tensor that the checkpoint lacks."""
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
        return cls(embedding, norm.to(device, torch.float32), config["rms_norm_eps"], head)

    def final_norm(self, last: Tensor) -> Tensor:
        """Last states [..., H] → what the head reads; in fp32 at least."""
        x = last.to(torch.promote_types(last.dtype, torch.float32))
        return x if self.last == "post_norm" else F.rms_norm(x, self.norm.shape, self.norm.to(x.dtype), self.eps)

    def logits(self, last: Tensor) -> Tensor:
        """Last states [..., H] → logits [..., V]."""
        return self.final_norm(last).to(self.head.dtype) @ self.head.mT

    def slot_embeddings(self, tokens: Tensor, mask_token_id: int, block_size: int) -> Tensor:
        """Inputs [A, B, H] of blocks whose anchors are tokens [A]: slot 0 holds the anchor, the others the mask token."""
        mask = self.embedding[mask_token_id].expand(len(tokens), block_size - 1, -1)
        return torch.cat((self.embedding[tokens][:, None], mask), 1).float()
