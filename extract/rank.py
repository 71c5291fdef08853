"""One tensor-parallel rank's part in publishing: copy its tokens' states out of vLLM's cache, then put and examine them.

Blocks are held only for the copy: a slow store holds no cache. Whatever happens to a save, it is reported.
"""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import KVCacheConfig

from configs.schema import Config
from store.objects import StoreError, open_store
from store.sample import Slice, put_slice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Why a sample was not published: a cause of the HTTP protocol and one line."""

    cause: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        cause = error.cause if isinstance(error, StoreError) else "engine"
        return cls(cause, " ".join(str(error).split()) or type(error).__name__)


@dataclass(frozen=True)
class Save:
    """A finished request: its blocks wait until every rank has looked at them, and has copied its part where they have a name."""

    request: str
    sample: str | None  # None: it names none, or was aborted
    tokens: int  # of the sample
    rows: int  # that were computed
    blocks: tuple[list[int], ...]  # of each cache group


@dataclass(frozen=True, eq=False)
class Copy:
    """This rank's states [t, m+1, H] of a sample on the host, and whether the request's last row is finite, once `done`."""

    save: Save
    start: int
    states: Tensor
    finite: Tensor
    done: torch.cuda.Event | None  # None: at once

    def ready(self) -> bool:
        return self.done is None or self.done.query()


class Worker:
    """Takes saves in their order. `group`: the cache group of the hidden states."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, group: int, block_size: int):
        self.vllm_config, self.groups, self.blocks = vllm_config, kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks
        self.group, self.block_size = group, block_size
        self.config = Config.model_validate(vllm_config.kv_transfer_config.kv_connector_extra_config["config"])
        self.copying: list[Copy] = []
        self.held: set[str] = set()  # requests whose copy failed and whose blocks are to be freed
        self.putting: dict[Future[Slice | Failure | None], str] = {}

    def register(self, kv_caches: dict[str, Tensor]) -> None:
        """The engine is up: find the states' cache [blocks, m+1, block_size, H], open the store."""
        (name,) = get_layers_from_vllm_config(self.vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        self.caches, self.cache = kv_caches, kv_caches[name]
        if self.cache.shape[2] != self.block_size:
            raise ValueError(f"{name}: blocks of {self.cache.shape[2]} tokens, its cache group says {self.block_size}")
        self.rank, self.ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.stream = torch.cuda.Stream() if self.cache.is_cuda else None
        self.store = open_store(self.config.store, share=1 / self.ranks)
        self.writers = ThreadPoolExecutor(self.config.extract.writers, "put")

    def save(self, save: Save) -> None:
        try:
            copy = self._copy(save)
            self.copying.append(copy)
            self.putting[self.writers.submit(self._put, copy)] = save.request
        except Exception as error:  # a rank that stays silent holds the blocks, and the asker, for ever
            log.exception("%s: its states could not be copied", save.sample or save.request)
            self.held.add(save.request)
            failed = Future()
            failed.set_result(Failure.of(error))
            self.putting[failed] = save.request

    def _copy(self, save: Save) -> Copy:
        start, stop = (save.tokens * edge // self.ranks for edge in (self.rank, self.rank + 1)) if save.sample else (0, 0)
        rows = torch.cat((torch.arange(start, stop), torch.tensor([save.rows - 1])))
        block, offset = torch.tensor(save.blocks[self.group])[rows // self.block_size], rows % self.block_size
        if self.stream is None:
            states = self.cache[block, :, offset]
            return Copy(save, start, states[:-1], states[-1].isfinite().all(), None)
        self.stream.wait_stream(torch.cuda.current_stream())  # the forward that wrote the states
        with torch.cuda.stream(self.stream):
            index = torch.stack((block, offset)).pin_memory().to(self.cache.device, non_blocking=True)
            states = self.cache[index[0], :, index[1]]
            host = torch.empty(states[:-1].shape, dtype=states.dtype, pin_memory=True).copy_(states[:-1], non_blocking=True)
            finite = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(states[-1].isfinite().all(), non_blocking=True)
        return Copy(save, start, host, finite, self.stream.record_event())

    def _put(self, copy: Copy) -> Slice | Failure | None:
        """What became of this rank's part; None: it has none."""
        sample, states = copy.save.sample, copy.states
        try:
            if copy.done is not None:
                copy.done.synchronize()
            if not copy.finite:
                return Failure("non_finite", "the verifier's states of these tokens are not finite")
            return put_slice(self.store, sample, self.rank, states, copy.start, self.config.store.codec) if len(states) else None
        except ValueError as error:  # the name is taken or is none; whoever has it keeps it
            return Failure("bad_request", str(error))
        except Exception as error:
            return Failure.of(error)

    def take_copied(self) -> set[str]:
        """Requests whose blocks may be freed."""
        ready = [copy for copy in self.copying if copy.ready()]
        self.copying = [copy for copy in self.copying if copy not in ready]
        for copy in ready:
            if not copy.finite:
                self._wipe(copy.save.blocks)
        held, self.held = self.held, set()
        return held | {copy.save.request for copy in ready}

    def _wipe(self, blocks: tuple[list[int], ...]) -> None:
        """Attention reads whole blocks and weighs what is masked with 0, which does not help against NaN: whoever gets these
        blocks next would be lost too."""
        for group, ids in zip(self.groups, blocks):
            for name in group.layer_names:
                cache = self.caches.get(name)
                if isinstance(cache, Tensor) and len(cache) == self.blocks:
                    cache[ids] = 0

    def take_reports(self, wait_s: float) -> dict[str, dict[int, Slice | Failure | None]]:
        if self.putting and wait_s:
            wait(self.putting, wait_s, FIRST_COMPLETED)
        done = [future for future in self.putting if future.done()]
        return {self.putting.pop(future): {self.rank: future.result()} for future in done}

    def close(self) -> None:
        if hasattr(self, "writers"):
            self.writers.shutdown()
            self.store.close()
