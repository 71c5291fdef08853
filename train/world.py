"""The ranks of a run. Without WORLD_SIZE a run is a world of one, and nothing here communicates."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over ranks, in the same order on all of them."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def from_rank_(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Replace each tensor by what `source` has."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, source)

    def shard(self, draft: nn.Module) -> None:
        """FSDP2: each rank keeps its rows of every parameter, and gradients come out as sums over ranks."""
        mesh = init_device_mesh(self.device.type, (self.size,))
        for module in (*draft.layers, draft):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def object_from_rank_0(self, value):
        """Rank 0's value (a small picklable one) on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]


@contextmanager
def world(stuck_s: float) -> Iterator[World]:
    """Join the ranks that torchrun or the launcher started: gloo on CPUs, nccl on GPUs (with gloo beside it for CPU tensors).

    A rank that waits for the others for `stuck_s` fails: one of them hangs.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=stuck_s))
    try:
        yield World(rank, size, device)
    finally:
        if size > 1:
            dist.destroy_process_group()
