"""Muon for the matrices of the decoder, AdamW for everything else, one schedule for both."""

from __future__ import annotations

import math
from itertools import zip_longest

import torch
import torch.distributed as dist
from muon import zeropower_via_newtonschulz5
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.schema import Muon as MuonConfig
from configs.schema import Train
from train.world import World

STEPS = 5  # of Newton-Schulz; the rounding of a Gram matrix grows twelvefold a step, so that it would not do for many more


def orthogonalise(matrix: Tensor) -> Tensor:
    """Nearest orthogonal matrix by quintic Newton-Schulz: the muon-optimizer package's bf16 iteration where bf16 products
    are fast, the same iteration in fp32 on CPUs, where they are thirty times slower. There it runs on the small Gram matrix G:
    each step multiplies x by a + b G + c G^2, so that x itself is multiplied only once."""
    if matrix.is_cuda:
        return zeropower_via_newtonschulz5(matrix, STEPS)
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    x = _newton_schulz(x @ x.mT) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def _newton_schulz(gram: Tensor) -> Tensor:
    """What all steps together multiply a matrix x by, of x x^T."""
    factor = product = None
    for _ in range(STEPS):
        gram = gram if factor is None else factor @ gram @ factor
        factor = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        factor.diagonal().add_(3.4445)
        product = factor if product is None else factor @ product
    return product


def share_out(matrices: list[Tensor], ranks: int) -> list[tuple[Tensor | None, ...]]:
    """Rounds in which rank r orthogonalises the r-th matrix: each has one owner, by cost of Newton-Schulz all ranks own about
    the same, and matrices of one round are alike, as the costliest come first."""
    loads, owned = [0] * ranks, [[] for _ in range(ranks)]
    for matrix in sorted(matrices, key=_cost, reverse=True):
        owner = loads.index(min(loads))
        loads[owner] += _cost(matrix)
        owned[owner].append(matrix)
    return list(zip_longest(*owned))


def _cost(matrix: Tensor) -> int:
    small, large = sorted(matrix.shape)
    return small * small * (2 * large + small)


class Muon(torch.optim.Optimizer):
    """Momentum (EMA form, Nesterov), orthogonalised; decoupled weight decay with the base learning rate.

    scale `match_rms_adamw` multiplies the update by 0.2 sqrt(max(rows, cols)), which is what the RedHat card ran; `spectral`
    by sqrt(max(1, rows / cols)), as the muon-optimizer package does. Of many ranks each orthogonalises the matrices that it
    owns; whole parameters are then broadcast from there, the rows of sharded ones (FSDP2) go there and come back.
    """

    def __init__(self, params: list[Tensor], lr: float, config: MuonConfig, world: World):
        super().__init__(params, {"lr": lr, "weight_decay": config.weight_decay})
        self.config, self.world, self.rounds = config, world, share_out(params, world.size)

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        for matrices in self.rounds:
            for matrix, update in zip(matrices, self._orthogonalised(matrices), strict=True):
                if matrix is not None:
                    rows, cols = matrix.shape
                    scale = 0.2 * max(rows, cols) ** 0.5 if self.config.scale == "match_rms_adamw" else max(1, rows / cols) ** 0.5
                    _local(matrix).mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)

    def _orthogonalised(self, matrices: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Updates of one round's matrices, laid out as these are."""
        mine = matrices[self.world.rank]
        directions = [None if matrix is None else self._direction(matrix) for matrix in matrices]
        if any(isinstance(matrix, DTensor) for matrix in matrices):
            sent = [0 if direction is None else direction.numel() for direction in directions]
            received = [0] * self.world.size if mine is None else _shard_sizes(mine)
            whole = _exchange(torch.cat([x.flatten() for x in directions if x is not None]), sent, received)
            if mine is not None:
                whole = orthogonalise(whole.view(mine.shape)).to(whole.dtype).flatten()
            parts = _exchange(whole, received, sent).split(sent)
            return [None if x is None else part.view(x.shape) for part, x in zip(parts, directions)]
        if mine is not None:  # before any of the others' is waited for
            directions[self.world.rank].copy_(orthogonalise(directions[self.world.rank]))
        for owner, direction in enumerate(directions):
            if direction is not None:
                self.world.from_rank_([direction], owner)
        return directions

    def _direction(self, matrix: Tensor) -> Tensor:
        """What is to be orthogonalised, of this rank's part; advances the momentum."""
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum, gradient = _local(state["momentum"]), _local(matrix.grad)
        momentum.lerp_(gradient, 1 - self.config.momentum)
        return gradient.lerp(momentum, self.config.momentum)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_sizes(matrix: DTensor) -> list[int]:
    """Elements of each rank's rows, as FSDP2 cuts them."""
    rows, ranks = matrix.shape[0], matrix.device_mesh.size()
    chunk = -(-rows // ranks)
    return [max(0, min(chunk, rows - rank * chunk)) * matrix.shape[1] for rank in range(ranks)]


def _exchange(parts: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Flat parts, `sent[r]` elements for rank r → what the others have for this one, in the order of ranks."""
    out = parts.new_empty(sum(received))
    dist.all_to_all_single(out, parts, received, sent)
    return out


def build_optimizers(draft: torch.nn.Module, config: Train, world: World) -> list[torch.optim.Optimizer]:
    """AdamW always; Muon before it if `train.optimizer` says so, for 2-D weights that are neither [1, N] nor Markov tables."""
    matrices, markov, rest = [], [], []
    for name, parameter in draft.named_parameters():
        if "markov_head" in name:
            markov.append(parameter)
        elif config.optimizer == "muon" and parameter.dim() == 2 and min(parameter.shape) > 1:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    groups = [{"params": rest, "lr": config.lr}, {"params": markov, "lr": config.lr * config.markov_lr_scale}]
    optimizers = [torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, weight_decay=config.weight_decay, fused=True)]
    if matrices:
        optimizers.insert(0, Muon(matrices, config.muon.lr or config.lr, config.muon, world))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_learning_rate(optimizers: list[torch.optim.Optimizer], step: int, total: int, config: Train) -> float:
    """Linear warm-up over `warmup_ratio`, then half a cosine down to `min_lr` at the last step. Returns train.lr's value."""
    warmup = int(config.warmup_ratio * total)
    floor = config.min_lr / config.lr
    if step < warmup:
        factor = (step + 1) / (warmup + 1)
    else:
        progress = (step - warmup) / max(1, total - warmup)
        factor = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
    return config.lr * factor
