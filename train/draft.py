"""The DSpark draft: a few decoder layers that read the verifier's taps as extra keys and values, a Markov head that biases
each slot by the token before it, and a confidence head. Parameter names are those of the speculators format, so an
export renames nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import Config
from store.contract import Contract
from store.verifier import text_config
from train.attention import attend, rotate


class DraftContract(Contract):
    """What a draft is, with every dimension resolved: it travels in checkpoints and exports."""

    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    sample_from_anchor: Literal[True] = True  # slot k predicts the token at anchor + k + 1
    causal: bool
    window: int | None
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    markov_rank: int
    loss_terms: dict[str, float]

    @classmethod
    def resolve(cls, config: Config) -> DraftContract:
        """Fill `null` dimensions from the verifier's own config; a recipe that gives all of them needs no verifier."""
        draft = config.draft
        given = draft.model_dump(exclude={"init"})
        missing = [key for key, value in given.items() if value is None and key != "window"]
        verifier = text_config(config.verifier.path) if missing else {}
        rope = verifier.get("rope_parameters") or {}
        heads = given["heads"] or verifier.get("num_attention_heads")
        hidden = given["hidden_size"] or verifier.get("hidden_size")
        default = {
            "hidden_size": hidden,
            "intermediate_size": verifier.get("intermediate_size"),
            "heads": heads,
            "kv_heads": verifier.get("num_key_value_heads") or heads,
            "head_dim": verifier.get("head_dim") or hidden // heads,
            "vocab_size": verifier.get("vocab_size"),
            "rms_norm_eps": verifier.get("rms_norm_eps"),
            "rope_theta": rope.get("rope_theta") or verifier.get("rope_theta") or 10000.0,
        }
        return cls(**given | {key: default[key] for key in missing}, loss_terms=config.loss.terms)


@dataclass
class Context:
    """Keys and values of the context for each draft layer: [D, T, kv_heads, head_dim], computed once per token."""

    layers: list[tuple[Tensor, Tensor]]

    def document(self, start: int, stop: int) -> Context:
        """The part of one document in a packed buffer."""
        return Context([(key[:, start:stop], value[:, start:stop]) for key, value in self.layers])


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with per-head q and k norms (Qwen3), over context and own block."""

    def __init__(self, spec: DraftContract):
        super().__init__()
        self.spec = spec
        self.q_proj = nn.Linear(spec.hidden_size, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, spec.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden_size, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., Hd] → rotated keys and values [..., kv_heads, head_dim]; the same weights serve context and block."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.spec.head_dim)))
        return rotate(key, positions, self.spec.rope_theta), self.v_proj(x).unflatten(-1, (-1, self.spec.head_dim))

    def forward(self, x: Tensor, positions: Tensor, context_kv: tuple[Tensor, Tensor]) -> Tensor:
        query = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.spec.head_dim)))
        query = rotate(query, positions, self.spec.rope_theta) * self.spec.head_dim**-0.5
        block_kv = self.keys_values(x, positions)
        mixed = attend(query, context_kv, block_kv, positions[..., 0], self.spec.causal, self.spec.window)
        return self.o_proj(mixed.flatten(-2))


class MLP(nn.Module):
    def __init__(self, spec: DraftContract):
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, spec: DraftContract):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, positions: Tensor, context_kv: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, context_kv)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """Low-rank bias of a slot's logits by the token right before it: `W2 W1[previous]`."""

    def __init__(self, spec: DraftContract):
        super().__init__()
        self.markov_w1 = nn.Embedding(spec.vocab_size, spec.markov_rank)
        self.markov_w2 = nn.Linear(spec.markov_rank, spec.vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """Logit of "the verifier will accept this slot", from the slot's final-normed state and its Markov embedding."""

    def __init__(self, spec: DraftContract):
        super().__init__()
        self.proj = nn.Linear(spec.hidden_size + spec.markov_rank, 1)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return self.proj(torch.cat((hidden, previous), -1)).squeeze(-1)


class Draft(nn.Module):
    """Embedding and output head are the verifier's, frozen, and not part of the module."""

    def __init__(self, spec: DraftContract):
        super().__init__()
        self.spec = spec
        width = len(spec.taps) * spec.hidden_size
        self.fc = nn.Linear(width, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.markov_head = MarkovHead(spec)
        self.confidence_head = ConfidenceHead(spec)
        # Fixed divisor of each tap dimension (warm start); exports fold it into `fc`, so engines see nothing of it.
        self.register_buffer("tap_scale", torch.ones(width))

    def context(self, taps: Tensor, positions: Tensor) -> Context:
        """taps [D, T, m * H], ascending; positions [D, T] in the document. The same feature feeds every layer's keys and
        values, without that layer's input norm."""
        feature = self.hidden_norm(self.fc(taps / self.tap_scale))
        return Context([layer.self_attn.keys_values(feature, positions) for layer in self.layers])

    def block(self, embeddings: Tensor, anchors: Tensor, context: Context) -> Tensor:
        """One parallel pass over the slots of all blocks.

        embeddings [D, A, B, Hd]: the anchor token's, then the mask token's; anchors [D, A]: positions in the document.
        Returns final-normed states [D, A, B, Hd]; slot k's predicts the token at anchor + k + 1.
        """
        positions = anchors[..., None] + torch.arange(embeddings.shape[2], device=anchors.device)
        x = embeddings
        for layer, context_kv in zip(self.layers, context.layers, strict=True):
            x = layer(x, positions, context_kv)
        return self.norm(x)


@torch.no_grad()
def initialise(draft: Draft, seed: int) -> None:
    """Random start: normal weights of std 0.02, a Markov bias near zero (std 0.01 on its embedding), confidence at one half."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in draft.named_parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.01 if "markov_w1" in name else 0.02))
    draft.confidence_head.proj.weight.zero_()
    draft.confidence_head.proj.bias.zero_()


def describe(spec: DraftContract) -> str:
    """Every tensor with its shape, and the totals, counted on the meta device."""
    with torch.device("meta"):
        parameters = dict(Draft(spec).named_parameters())
    lines = [f"{name:<52} {list(p.shape)!s:>18} {p.numel():>15,}" for name, p in parameters.items()]
    return "\n".join([*lines, f"{len(parameters)} tensors, {sum(p.numel() for p in parameters.values()):,} parameters"])
