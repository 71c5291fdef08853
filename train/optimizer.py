"""Muon for the matrices of the decoder, AdamW for everything else, one schedule for both."""

from __future__ import annotations

import math

import torch
from muon import zeropower_via_newtonschulz5
from torch import Tensor

from configs.schema import Muon as MuonConfig
from configs.schema import Train


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """Nearest orthogonal matrix by quintic Newton-Schulz: the muon-optimizer package's bf16 iteration where bf16 products
    are fast, the same iteration in fp32 on CPUs, where they are thirty times slower."""
    if matrix.is_cuda:
        return zeropower_via_newtonschulz5(matrix, steps)
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Momentum (EMA form, Nesterov), orthogonalised; decoupled weight decay with the base learning rate.

    scale `match_rms_adamw` multiplies the update by 0.2 sqrt(max(rows, cols)), which is what the RedHat card ran; `spectral`
    by sqrt(max(1, rows / cols)), as the muon-optimizer package does.
    """

    def __init__(self, params, lr: float, config: MuonConfig):
        super().__init__(params, {"lr": lr, "weight_decay": config.weight_decay})
        self.config = config

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                momentum.lerp_(parameter.grad, 1 - self.config.momentum)
                update = orthogonalise(parameter.grad.lerp(momentum, self.config.momentum), self.config.newton_schulz_steps)
                rows, cols = parameter.shape
                scale = 0.2 * max(rows, cols) ** 0.5 if self.config.scale == "match_rms_adamw" else max(1, rows / cols) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * scale)


def build_optimizers(draft: torch.nn.Module, config: Train) -> list[torch.optim.Optimizer]:
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
        optimizers.insert(0, Muon(matrices, config.muon.lr or config.lr, config.muon))
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
