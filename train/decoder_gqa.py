"""Grouped-query attention with per-head q and k norms (Qwen3), over context and own block."""

from __future__ import annotations

from torch import Tensor, nn

from train.attention import Packing, attend
from train.contract import DraftContract
from train.rope import frequencies, rotate, softmax_scale


class GQAttention(nn.Module):
    def __init__(self, spec: DraftContract, layer: int):
        super().__init__()
        self.gqa = gqa = spec.gqa
        self.causal, self.window = spec.reach(layer)
        self.q_proj = nn.Linear(spec.hidden_size, gqa.heads * gqa.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, gqa.kv_heads * gqa.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, gqa.kv_heads * gqa.head_dim, bias=False)
        self.o_proj = nn.Linear(gqa.heads * gqa.head_dim, spec.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(gqa.head_dim, spec.rms_norm_eps)
        self.k_norm = nn.RMSNorm(gqa.head_dim, spec.rms_norm_eps)

    @property
    def cached_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of what `keys_values` keeps of one token."""
        return ((self.gqa.kv_heads, self.gqa.head_dim),) * 2

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., Hd] → rotated keys and values [..., kv_heads, head_dim]; the same weights serve context and block."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.gqa.head_dim)))
        return self._rotate(key, positions), self.v_proj(x).unflatten(-1, (-1, self.gqa.head_dim))

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], packing: Packing | None = None) -> Tensor:
        query = self._rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.gqa.head_dim))), positions)
        query = query * softmax_scale(self.gqa.head_dim)
        mixed = attend(query, context, self.keys_values(x, positions), positions[..., 0], self.causal, self.window, packing)
        return self.o_proj(mixed.flatten(-2))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions, frequencies(self.gqa.head_dim, self.gqa.rope_theta, device=x.device))
