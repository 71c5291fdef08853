"""One tensor-parallel rank's part in publishing: copy its tokens' states out of vLLM's cache, then check and put them.

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

from configs.schema import Config
from store.objects import StoreError, open_store
from store.sample import Slice, all_finite, put_slice

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
    """A finished request whose states every rank puts its part of."""

    request: str
    sample: str
    tokens: int
    blocks: list[int]  # of the hidden states' cache group


class Worker:
    """One rank: copies its tokens of each save out of the cache and puts them, in the order of the saves."""

    def __init__(self, vllm_config: VllmConfig, block_size: int):
        self.vllm_config, self.block_size = vllm_config, block_size
        self.config = Config.model_validate(vllm_config.kv_transfer_config.kv_connector_extra_config["config"])
        self.copying: dict[str, torch.cuda.Event | None] = {}  # request -> when its blocks are no longer needed
        self.putting: dict[Future[Slice | Failure | None], str] = {}

    def register(self, kv_caches: dict[str, Tensor]) -> None:
        """The engine is up: find the cache [blocks, m+1, block_size, H], open the store."""
        (name,) = get_layers_from_vllm_config(self.vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        self.cache = kv_caches[name]
        if self.cache.shape[2] != self.block_size:
            raise ValueError(f"{name}: blocks of {self.cache.shape[2]} tokens, its cache group says {self.block_size}")
        self.rank, self.ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.stream = torch.cuda.Stream() if self.cache.is_cuda else None
        self.store = open_store(self.config.store)
        self.writers = ThreadPoolExecutor(self.config.extract.writers, "put")

    def save(self, save: Save) -> None:
        start, stop = (save.tokens * edge // self.ranks for edge in (self.rank, self.rank + 1))
        try:
            states, copied = self._copy(save.blocks, start, stop)
            self.copying[save.request] = copied
            self.putting[self.writers.submit(self._put, save.sample, states, start, copied)] = save.request
        except Exception as error:  # a rank that stays silent holds the blocks, and the asker, for ever
            log.exception("%s: tokens %d..%d could not be copied", save.sample, start, stop)
            self.copying[save.request] = None
            failed = Future()
            failed.set_result(Failure.of(error))
            self.putting[failed] = save.request

    def _copy(self, blocks: list[int], start: int, stop: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """States [t, m+1, H] of tokens start..stop on the host, and when they are there (None: now)."""
        tokens = torch.arange(start, stop)
        block, offset = torch.tensor(blocks)[tokens // self.block_size], tokens % self.block_size
        if self.stream is None:
            return self.cache[block, :, offset], None
        self.stream.wait_stream(torch.cuda.current_stream())  # the forward that wrote the states
        with torch.cuda.stream(self.stream):
            index = torch.stack((block, offset)).pin_memory().to(self.cache.device, non_blocking=True)
            states = self.cache[index[0], :, index[1]]
            host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True).copy_(states, non_blocking=True)
        return host, self.stream.record_event()

    def _put(self, sample: str, states: Tensor, start: int, copied: torch.cuda.Event | None) -> Slice | Failure | None:
        try:
            if copied is not None:
                copied.synchronize()
            if not len(states):
                return None
            if not all_finite(states):
                return Failure("non_finite", f"states of tokens {start}..{start + len(states)} are not finite")
            return put_slice(self.store, sample, self.rank, states, start)
        except ValueError as error:  # the name is taken or is none; whoever has it keeps it
            return Failure("bad_request", str(error))
        except Exception as error:
            return Failure.of(error)

    def take_copied(self) -> set[str]:
        """Requests whose blocks may be freed."""
        copied = {request for request, event in self.copying.items() if event is None or event.query()}
        for request in copied:
            del self.copying[request]
        return copied

    def take_reports(self, wait_s: float) -> dict[str, dict[int, Slice | Failure | None]]:
        if self.putting and wait_s:
            wait(self.putting, wait_s, FIRST_COMPLETED)
        done = [future for future in self.putting if future.done()]
        return {self.putting.pop(future): {self.rank: future.result()} for future in done}

    def close(self) -> None:
        if hasattr(self, "writers"):
            self.writers.shutdown()
            self.store.close()
