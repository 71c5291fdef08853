"""What an engine computes from an exported draft: a second implementation, written from the rules of vLLM's draft models and
sharing nothing with the one that is trained, so that a mistake would have to be made twice.

It reads config.json as the engine does, and works as the engine does: keys and values of context and block lie in one cache
by position, one block of one request is drafted at a time, and MLA attends in its latent space.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class ServedDraft:
    """A draft folder of either format, in fp64. Raises ValueError where engines would refuse it or compute something else."""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        self.mla = config["architectures"] == ["K3DSparkModel"]
        if not config.get("sample_from_anchor", self.mla):
            raise ValueError(f"{folder}: without sample_from_anchor engines predict one slot less, each a token earlier")
        if "rope_interleave" in config:
            raise ValueError(f"{folder}: rope_interleave makes some engines pair the halves of a rotary key")
        self.layer = config if self.mla else config["transformer_layer_config"]
        self.block_size = config["block_size"]
        self.taps = [output + 1 for output in config["target_layer_ids"]] if self.mla else config["aux_hidden_state_layer_ids"]
        if self.mla and config["num_target_layers"] != len(self.taps):
            raise ValueError(f"{folder}: num_target_layers must be the number of target_layer_ids")
        self.weights = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.weights |= load_file(file)
        self.rounded = any(x.dtype == torch.bfloat16 for x in self.weights.values())
        self.weights = {name: x.double() if x.is_floating_point() else x for name, x in self.weights.items()}
        self.names = ("context_proj", "context_norm", "final_norm") if self.mla else ("fc", "hidden_norm", "norm")

    def hidden(self, taps: Tensor, inputs: Tensor) -> Tensor:
        """Final-normed states [B, Hd] of the block after a context. taps [p, m * H]; inputs [B, Hd]: embeddings of the anchor, at
        position p, and of the mask tokens."""
        projection, context_norm, final_norm = self.names
        context = self._norm(taps.double() @ self.weights[f"{projection}.weight"].T, context_norm)
        positions = torch.arange(len(taps), len(taps) + len(inputs))
        x = inputs.double()
        for number in range(self.layer["num_hidden_layers"]):
            name = f"layers.{number}"
            normed = self._norm(x, f"{name}.input_layernorm")
            cached = torch.cat((context, normed))  # context enters as it is, without the layer's own norm
            visible = self._visible(number, positions, torch.arange(len(cached)))
            attend = self._latent_attention if self.mla else self._grouped_attention
            x = x + self._linear(attend(f"{name}.self_attn", normed, cached, positions, visible), f"{name}.self_attn.o_proj")
            normed = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = self._linear(normed, f"{name}.mlp.gate_proj"), self._linear(normed, f"{name}.mlp.up_proj")
            x = x + self._linear(gate * torch.sigmoid(gate) * up, f"{name}.mlp.down_proj")
        return self._norm(x, final_norm)

    def bias(self, token: int) -> Tensor:
        """What the Markov head adds to the logits [Vd] of the slot after `token`."""
        return self.weights["markov_head.markov_w2.weight"] @ self.weights["markov_head.markov_w1.weight"][token]

    def confidence(self, hidden: Tensor, token: int) -> Tensor:
        """Logit that the verifier accepts the slot of `hidden` [Hd] after `token`."""
        feature = torch.cat((hidden, self.weights["markov_head.markov_w1.weight"][token]))
        return (self.weights["confidence_head.proj.weight"] @ feature + self.weights["confidence_head.proj.bias"])[0]

    def _visible(self, number: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Which cached positions each query sees, bool [B, p + B]."""
        types = self.layer.get("layer_types")
        sliding = types is not None and types[number] == "sliding_attention"
        causal = self.layer.get("is_causal")
        causal = sliding if causal is None else causal
        distance = queries[:, None] - keys[None, :]
        visible = distance >= 0 if causal else distance > -len(keys)
        return visible & (distance.abs() <= self.layer["sliding_window"] - 1) if sliding else visible

    def _grouped_attention(self, name: str, normed: Tensor, cached: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        size = self.layer["head_dim"]
        theta = self.layer["rope_parameters"]["rope_theta"]
        angles = theta ** -(torch.arange(size // 2).double() * 2 / size)

        def heads(x: Tensor, projection: str, norm: str | None, at: Tensor | None) -> Tensor:
            x = self._linear(x, f"{name}.{projection}").view(len(x), -1, size).transpose(0, 1)
            if norm is None:
                return x
            x = self._norm(x, f"{name}.{norm}")
            turn = torch.exp(1j * at.double()[:, None] * angles)
            pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn
            return torch.cat((pairs.real, pairs.imag), -1)

        query = heads(normed, "q_proj", "q_norm", positions)
        key, value = heads(cached, "k_proj", "k_norm", torch.arange(len(cached))), heads(cached, "v_proj", None, None)
        share = len(query) // len(key)
        scores = query @ key.repeat_interleave(share, 0).transpose(1, 2) / math.sqrt(size)
        mixed = scores.masked_fill(~visible, -math.inf).softmax(-1) @ value.repeat_interleave(share, 0)
        return mixed.transpose(0, 1).flatten(1)

    def _latent_attention(self, name: str, normed: Tensor, cached: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        heads, nope, rope = (self.layer[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
        rank = self.layer["kv_lora_rank"]
        angles, sharpness = self._latent_rope(rope)

        def turn(x: Tensor, at: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * torch.exp(1j * at.double()[:, None] * angles)).flatten(-2)

        down = self._norm(self._linear(normed, f"{name}.q_a_proj"), f"{name}.q_a_layernorm")
        query = self._linear(down, f"{name}.q_b_proj").view(len(normed), heads, nope + rope).transpose(0, 1)
        small = self._linear(cached, f"{name}.kv_a_proj_with_mqa")
        latent = self._norm(small[:, :rank], f"{name}.kv_a_layernorm")
        key_turned = turn(small[:, rank:], torch.arange(len(cached)))
        up = self.weights[f"{name}.kv_b_proj.weight"].view(heads, -1, rank)
        into_latent, out_of_latent = up[:, :nope], up[:, nope:]
        scores = (query[..., :nope] @ into_latent) @ latent.T + turn(query[..., nope:], positions) @ key_turned.T
        scores = scores * sharpness / math.sqrt(nope + rope)
        mixed = scores.masked_fill(~visible, -math.inf).softmax(-1) @ latent
        return (mixed @ out_of_latent.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _latent_rope(self, size: int) -> tuple[Tensor, float]:
        """Angles per position of the pairs [size / 2], and the factor of the scores, as DeepSeek's YaRN has them."""
        rope = self.layer["rope_parameters"]
        theta = rope["rope_theta"]
        plain = theta ** -(torch.arange(size // 2).double() * 2 / size)
        if rope["rope_type"] == "default":
            return plain, 1.0
        length, factor = rope["original_max_position_embeddings"], rope["factor"]
        turning = [
            size * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta)) for turns in (rope["beta_fast"], rope["beta_slow"])
        ]
        first, last = max(math.floor(turning[0]), 0), min(math.ceil(turning[1]), size - 1)
        blend = [min(max((pair - first) / max(last - first, 0.001), 0.0), 1.0) for pair in range(size // 2)]
        keep = 1 - torch.tensor(blend, dtype=torch.float64)
        mscale = {key: 0.1 * rope[key] * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim")}
        if mscale["mscale"] != mscale["mscale_all_dim"]:
            raise ValueError("mscale and mscale_all_dim differ: rotary keys would be stretched")
        return plain / factor * (1 - keep) + plain * keep, mscale["mscale_all_dim"] ** 2

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.layer["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T
