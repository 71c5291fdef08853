"""A verifier with Kimi-K3's residual stream in pure torch: a bank of blocks, prefix sums that restart, mixtures that layers read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, HIDDEN, LAYERS, BLOCK = 256, 32, 6, 2
EPS = 1e-6


class Mixture(nn.Module):
    """What a layer reads: blocks and prefix, weighted by a softmax over one score of each."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(1 + 0.3 * torch.randn(HIDDEN))
        self.score = nn.Parameter(torch.randn(HIDDEN) / HIDDEN**0.5)

    def forward(self, blocks: list[Tensor], prefix: Tensor) -> Tensor:
        sources = torch.stack([*blocks, prefix])  # [sources, T, H]
        scores = F.rms_norm(sources, (HIDDEN,), self.norm, EPS) @ self.score
        return (scores.softmax(0)[..., None] * sources).sum(0)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.read_attention, self.read_mlp = Mixture(), Mixture()
        self.attention, self.mlp = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))


class BlockBank(nn.Module):
    """forward(tokens [T]) returns, as vLLM's K3 does, the mixture after the last layer [T, H] and the prefix sums after each
    layer of `aux_hidden_state_layers`, ascending."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(num_hidden_layers=LAYERS)
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.read_output, self.norm = Mixture(), nn.Parameter(1 + 0.3 * torch.randn(HIDDEN))

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, list[Tensor]]:
        blocks: list[Tensor] = []
        prefix, captures = self.embedding(tokens), []
        for index, layer in enumerate(self.layers):
            read = layer.read_attention(blocks, prefix)
            mixed = layer.attention(read.cumsum(0) / torch.arange(1, len(read) + 1)[:, None])  # causal: a mean of what came before
            if index % BLOCK == 0:
                blocks.append(prefix)
                prefix = mixed
            else:
                prefix = prefix + mixed
            prefix = prefix + F.silu(layer.mlp(layer.read_mlp(blocks, prefix)))
            if index + 1 in self.aux_hidden_state_layers:
                captures.append(prefix)
        output = self.read_output(blocks, prefix)
        return (output, captures) if captures else output

    @torch.no_grad()
    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(max_tokens):
            result = self(torch.tensor(tokens))
            output = result[0] if isinstance(result, tuple) else result
            tokens.append(int(self.head(F.rms_norm(output[-1], (HIDDEN,), self.norm, EPS)).argmax()))
        return tokens[len(prompt) :]

    @torch.no_grad()
    def states(self, tokens: list[int]) -> Tensor:
        """What an extractor would publish: [T, m+1, H]."""
        return torch.stack(self(torch.tensor(tokens))[1], 1)

    def save(self, folder: Path) -> Path:
        """The files that a trainer reads of a verifier."""
        folder.mkdir()
        config = f'{{"num_hidden_layers": {LAYERS}, "hidden_size": {HIDDEN}, "vocab_size": {VOCAB}, "rms_norm_eps": {EPS}'
        (folder / "config.json").write_text(config + ', "tie_word_embeddings": false}')
        names = {"model.embed_tokens": self.embedding.weight, "model.norm": self.norm, "lm_head": self.head.weight}
        save_file({f"{name}.weight": tensor.detach().contiguous() for name, tensor in names.items()}, folder / "model.safetensors")
        return folder
