"""The DSpark draft: a few decoder layers that read the verifier's taps as extra keys and values, a Markov head that biases
each slot by the token before it, and a confidence head. Parameter names are those of the speculators format, so an
export renames nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from train.attention import Packing
from train.contract import DraftContract
from train.decoder_gqa import GQAttention
from train.decoder_mla import MLAttention

Context = list[tuple[Tensor, Tensor]]  # what each draft layer keeps of every context token, [D, T, ...], computed once


class MLP(nn.Module):
    def __init__(self, spec: DraftContract):
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What is between the products is not kept for the backward pass: it is cheap to compute again."""
        return checkpoint(self._down, self.gate_proj(x), self.up_proj(x), use_reentrant=False, preserve_rng_state=False)

    def _down(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, spec: DraftContract, number: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = MLAttention(spec, number) if spec.mla else GQAttention(spec, number)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, positions: Tensor, feature: Tensor, context_positions: Tensor, packing: Packing) -> Tensor:
        return self.block(x, positions, self.self_attn.keys_values(feature, context_positions), packing)

    def block(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], packing: Packing | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, context, packing)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """Low-rank bias of a slot's logits by the token right before it: `W2 W1[previous]`."""

    def __init__(self, spec: DraftContract):
        super().__init__()
        self.markov_w1 = nn.Embedding(spec.vocab_size, spec.markov_rank)
        self.markov_w2 = nn.Linear(spec.markov_rank, spec.draft_vocab_size, bias=False)


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
        self.hidden_norm = nn.RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec, number) for number in range(spec.layers))
        self.norm = nn.RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.markov_head = MarkovHead(spec)
        self.confidence_head = ConfidenceHead(spec)
        # Fixed divisor of each tap dimension (warm start); exports fold it into `fc`, so engines see nothing of it.
        self.register_buffer("tap_scale", torch.ones(width))
        # Token ids of a reduced vocabulary, ascending.
        self.register_buffer("kept", torch.arange(spec.draft_vocab_size) if spec.reduced else None)

    def forward(self, taps: Tensor, context_positions: Tensor, embeddings: Tensor, anchors: Tensor, packing: Packing) -> Tensor:
        """`context` and `block` of a packed batch in one call (D = 1), which is what sharded parameters need."""
        feature, positions, x = self.feature(taps), slot_positions(anchors, embeddings.shape[2]), embeddings
        for layer in self.layers:
            x = layer(x, positions, feature, context_positions, packing)
        return self.norm(x)

    def feature(self, taps: Tensor) -> Tensor:
        """taps [D, T, m * H], ascending → what feeds every layer's context keys and values, without that layer's input norm."""
        weight = self.fc.weight / self.tap_scale
        return self.hidden_norm(F.linear(taps.to(weight.dtype), weight))

    def context(self, taps: Tensor, positions: Tensor) -> Context:
        """taps [D, T, m * H]; positions [D, T] in the document."""
        feature = self.feature(taps)
        return [layer.self_attn.keys_values(feature, positions) for layer in self.layers]

    def block(self, embeddings: Tensor, anchors: Tensor, context: Context) -> Tensor:
        """One parallel pass over the slots of all blocks.

        embeddings [D, A, B, Hd]: the anchor token's, then the mask token's; anchors [D, A]: positions in the document.
        Returns final-normed states [D, A, B, Hd]; slot k's predicts the token at anchor + k + 1.
        """
        x, positions = embeddings, slot_positions(anchors, embeddings.shape[2])
        for layer, kept in zip(self.layers, context, strict=True):
            x = layer.block(x, positions, kept)
        return self.norm(x)


def slot_positions(anchors: Tensor, block_size: int) -> Tensor:
    return anchors[..., None] + torch.arange(block_size, device=anchors.device)


@torch.no_grad()
def initialise(draft: Draft, seed: int) -> None:
    """Random start: normal weights of std 0.02, a Markov bias near zero (std 0.01 on its embedding), confidence at one half."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in draft.named_parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.01 if "markov_w1" in name else 0.02))
    draft.confidence_head.proj.weight.zero_()
    draft.confidence_head.proj.bias.zero_()
