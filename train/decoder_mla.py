"""Multi-head latent attention (Kimi-K3): a token's keys and values are one small latent vector and one rotary key that all
heads share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from train.attention import Packing, attend
from train.contract import DraftContract
from train.rope import frequencies, rotate, softmax_scale


class MLAttention(nn.Module):
    def __init__(self, spec: DraftContract, layer: int):
        super().__init__()
        self.mla = mla = spec.mla
        self.causal, self.window = spec.reach(layer)
        self.q_a_proj = nn.Linear(spec.hidden_size, mla.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(mla.q_lora_rank, spec.rms_norm_eps)
        self.q_b_proj = nn.Linear(mla.q_lora_rank, mla.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(spec.hidden_size, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(mla.kv_lora_rank, spec.rms_norm_eps)
        self.kv_b_proj = nn.Linear(mla.kv_lora_rank, mla.heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False)
        self.o_proj = nn.Linear(mla.heads * mla.v_head_dim, spec.hidden_size, bias=False)

    @property
    def cached_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of what `keys_values` keeps of one token."""
        return (self.mla.kv_lora_rank,), (self.mla.qk_rope_head_dim,)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., Hd] → normed latent [..., kv_lora_rank] and rotated key [..., rope_dim], which engines cache as they are."""
        latent, rotary = self.kv_a_proj_with_mqa(x).split((self.mla.kv_lora_rank, self.mla.qk_rope_head_dim), -1)
        return self.kv_a_layernorm(latent), self._rotate(rotary[..., None, :], positions).squeeze(-2)

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], packing: Packing | None = None) -> Tensor:
        mla = self.mla
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (mla.heads, -1))
        nope, rotary = query.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), -1)
        query = torch.cat((nope, self._rotate(rotary, positions)), -1)
        query = query * softmax_scale(query.shape[-1], mla.yarn)
        own = self._per_head(*self.keys_values(x, positions))
        mixed = attend(query, self._per_head(*context), own, positions[..., 0], self.causal, self.window, packing)
        return self.o_proj(mixed.flatten(-2))

    def _per_head(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [..., heads, nope + rope] and values [..., heads, v_head_dim] of cached tokens."""
        mla = self.mla
        nope, value = self.kv_b_proj(latent).unflatten(-1, (mla.heads, -1)).split((mla.qk_nope_head_dim, mla.v_head_dim), -1)
        return torch.cat((nope, rotary[..., None, :].expand(*nope.shape[:-1], -1)), -1), value

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        inverse = frequencies(self.mla.qk_rope_head_dim, self.mla.rope_theta, self.mla.yarn, x.device)
        return rotate(x, positions, inverse, interleaved=True)
