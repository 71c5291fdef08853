"""States of token ids for one rank: out of the durable cache where they are there, else made by an extractor, fetched, checked
and removed from the store.

Flow control is local: a rank owns `store.bytes / world` of the store and never has more asked for.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from configs.schema import Config
from extract.pool import HOPELESS, ExtractionError, Pool
from store.cache import DurableCache
from store.contract import StateContract
from store.objects import Full, StoreError, open_store, run_prefix
from store.sample import discard, fetch
from store.verifier import text_config

OF_THE_SAMPLE = HOPELESS | {"non_finite"}  # causes that cost the sample and not the run
MANIFEST_BYTES = 4096, 12  # of a sample, and of each of its token ids, at most


class NoStates(RuntimeError):
    """States cannot be had any more; the message says why."""


class StateSource:
    """Any thread may call `obtain`. `contract` is set once the handshake has passed."""

    contract: StateContract

    def __init__(self, config: Config, pool: Pool, rank: int = 0, world: int = 1, keep: bool = False):
        self.pool, self.rank, self.attempts = pool, rank, config.pool.attempts
        self.width = text_config(config.verifier.path)["hidden_size"]
        self.store = open_store(config.store)
        self.cache = DurableCache(config.store.cache_path, config.store.cache_bytes) if keep else None
        self.gate = ByteGate(config.store.bytes // world)
        self.run = run_prefix(config.run_dir) + uuid.uuid4().hex[:8]  # attempts of an earlier launch can never be mistaken for ours
        self.drops: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self._sequence = itertools.count()

    def buffer(self, tokens: int) -> Tensor:
        """Where states land: [tokens, m + 1, H], pinned beside a GPU."""
        shape, dtype = (tokens, len(self.contract.taps) + 1, self.width), getattr(torch, self.contract.dtype)
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())

    def obtain(self, token_ids: list[int], out: Tensor) -> bool:
        """Fill `out` [T, m + 1, H] with the states of these tokens. False if they cannot be made (counted in `drops`).

        Raises NoStates once `pool.attempts` attempts have failed for a reason that is not the sample's own.
        """
        if self.cache and self._cached(token_ids, out):
            return True
        try:
            self.make(token_ids, out)
        except (ExtractionError, StoreError) as error:
            if error.cause not in OF_THE_SAMPLE:
                raise NoStates(f"{self.attempts} attempts failed, the last one: {error.cause}: {error}") from None
            self.drops[error.cause] += 1
            return False
        self._keep(token_ids, out)
        return True

    def make(self, token_ids: list[int], out: Tensor) -> None:
        """Have the states made now, whatever the cache holds. Raises the last attempt's ExtractionError or StoreError."""
        sequence = next(self._sequence)
        for attempt in range(self.attempts):
            try:
                with self._attempt(f"{sequence}/{attempt}", len(token_ids)) as name:
                    self.pool.make(name, token_ids)
                    fetch(self.store, name, self.contract, token_ids, out)
                return
            except (ExtractionError, StoreError) as error:
                self.retries[error.cause] += 1
                if error.cause in HOPELESS or attempt + 1 == self.attempts:
                    raise
            time.sleep(min(5.0, 0.1 * 2**attempt))

    def complete(self, prompt: list[int], max_tokens: int, **sampling) -> tuple[list[int], str]:
        """As the pool does it; what the verifier computes on the way is kept in the cache. Raises ExtractionError."""
        try:
            with self._attempt(f"{next(self._sequence)}/0", len(prompt) + max_tokens) as name:
                response, reason = self.pool.complete(prompt, max_tokens, sample=name, **sampling)
                token_ids = [*prompt, *response][:-1]
                out = self.buffer(len(token_ids))
                fetch(self.store, name, self.contract, token_ids, out)
        except StoreError as error:
            raise ExtractionError(error.cause, str(error)) from None
        self._keep(token_ids, out)
        return response, reason

    def has(self, token_ids: list[int]) -> bool:
        """Whether the cache holds what `obtain` needs."""
        return self.cache.has(self.contract, token_ids) or self.cache.has(self.contract, token_ids[:-1])

    def _cached(self, token_ids: list[int], out: Tensor) -> bool:
        """What a rollout left lacks the last token's state, which no slot's context or teacher is: zeros will do."""
        if self.cache.get_into(self.contract, token_ids, out):
            return True
        out[-1:] = 0
        return len(token_ids) > 1 and self.cache.get_into(self.contract, token_ids[:-1], out[:-1])

    @contextmanager
    def _attempt(self, number: str, tokens: int) -> Iterator[str]:
        """The name of a sample, for which there is room in this rank's share, and of which nothing stays in the store."""
        name, size = f"{self.run}/{self.rank}/{number}", MANIFEST_BYTES[0] + tokens * (self.buffer(1).nbytes + MANIFEST_BYTES[1])
        self.gate.acquire(size)
        try:
            yield name
        finally:
            discard(self.store, name)
            self.gate.release(size)

    def _keep(self, token_ids: list[int], states: Tensor) -> None:
        """Put fetched states into the durable cache; one that cannot hold them costs a prefill later and nothing now."""
        if self.cache:
            try:
                self.cache.put(self.contract, token_ids, states)
            except Full:
                self.retries["cache_full"] += 1

    def close(self) -> None:
        self.store.close()


class ByteGate:
    """Keeps the bytes asked for and not yet removed within this rank's share of the store."""

    def __init__(self, share: int):
        self.share, self.used, self.changed = share, 0, threading.Condition()

    def acquire(self, size: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.used + size <= self.share or self.used == 0)
            self.used += size

    def release(self, size: int) -> None:
        with self.changed:
            self.used -= size
            self.changed.notify_all()
