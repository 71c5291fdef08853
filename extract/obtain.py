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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import Tensor

from configs.command import PlainError
from configs.schema import Config
from configs.schema import Pool as PoolSettings
from extract.pool import HOPELESS, ExtractionError, Pool
from store.cache import DurableCache
from store.contract import StateContract
from store.objects import Full, Gone, StoreError, open_store, run_prefix
from store.sample import discard, fetch
from store.verifier import text_config

T = TypeVar("T")
AWAY = frozenset({"no_room", "store_gone", "no_extractor", "unreachable", "draining"})  # causes that pass: full, or being restarted
OF_THE_SAMPLE = HOPELESS | {"non_finite"}  # causes that cost the sample and not the run
MANIFEST_BYTES = 4096, 12  # of a sample, and of each of its token ids, at most


class NoStates(PlainError):
    """States, or answers, cannot be had any more; the message says why."""


def persist(settings: PoolSettings, attempt: Callable[[int], T], retries: Counter[str]) -> T:
    """What `attempt` (given its number) returns once it succeeds; `retries` counts the errors before, by cause.

    Raises the last ExtractionError or StoreError where it is what was asked that cannot be served. NoStates once `pool.attempts`
    attempts have failed for another reason, or what answers has been away for `pool.deadline_s`.
    """
    failures, patience = 0, time.monotonic() + settings.deadline_s
    for number in itertools.count():
        try:
            return attempt(number)
        except (ExtractionError, StoreError) as error:
            retries[error.cause] += 1
            failures += error.cause not in AWAY or time.monotonic() > patience
            if error.cause in HOPELESS or failures == settings.attempts:
                if error.cause in OF_THE_SAMPLE:
                    raise
                raise NoStates(f"{number + 1} attempts failed, the last one: {error.cause}: {error}") from None
        time.sleep(min(5.0, 0.1 * 2 ** min(number, 6)))


class StateSource:
    """Any thread may call `obtain`. `contract` is set once the handshake has passed."""

    contract: StateContract

    def __init__(self, config: Config, pool: Pool, rank: int = 0, world: int = 1, keep: bool = False):
        self.pool, self.rank, self.settings = pool, rank, config.pool
        self.room, self.width = config.store.bytes, text_config(config.verifier.path)["hidden_size"]
        self.store = open_store(config.store)
        self.cache = DurableCache(config.store.cache_path, config.store.cache_bytes) if keep else None
        self.gate = ByteGate(config.store.bytes // world)
        self.run = run_prefix(config.run_dir) + uuid.uuid4().hex[:8]  # attempts of an earlier launch can never be mistaken for ours
        self.drops: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.meter: Counter[str] = Counter()  # bytes fetched, seconds of threads: waiting for room, for the extractor, fetching
        self._told: Counter[str] = Counter()
        self._missed = 0  # samples in a row
        self._sequence = itertools.count()

    def buffer(self, tokens: int) -> Tensor:
        """Where states land: [tokens, m + 1, H], pinned beside a GPU."""
        shape, dtype = (tokens, len(self.contract.taps) + 1, self.width), getattr(torch, self.contract.dtype)
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())

    def obtain(self, token_ids: list[int], out: Tensor) -> bool:
        """Fill `out` [T, m + 1, H] with the states of these tokens. False if they cannot be made (counted in `drops`).

        Raises NoStates as `persist` does, and after `pool.failures` such samples in a row.
        """
        if self.cache and self._cached(token_ids, out):
            return True
        try:
            self.make(token_ids, out)
        except (ExtractionError, StoreError) as error:
            self.drops[error.cause] += 1
            self._missed += 1
            if self._missed < self.settings.failures:
                return False
            raise NoStates(f"{self._missed} samples in a row could not be made (pool.failures): {dict(self.drops)}") from None
        self._missed = 0
        self._keep(token_ids, out)
        return True

    def make(self, token_ids: list[int], out: Tensor) -> None:
        """As `obtain`, whatever the cache holds. Raises the last attempt's ExtractionError or StoreError where it is the sample's."""
        if self.contract.codec == "raw" and out.nbytes > self.room:
            raise NoStates(f"a sample of {len(token_ids)} tokens takes {out.nbytes} bytes, store.bytes is {self.room}")

        def ask(name: str) -> tuple[list[int], Tensor]:
            self.pool.make(name, token_ids)
            return token_ids, out

        sequence = next(self._sequence)
        persist(self.settings, lambda attempt: self._attempt(f"{sequence}/{attempt}", len(token_ids), ask), self.retries)

    def complete(self, prompt: list[int], max_tokens: int, **sampling) -> tuple[list[int], str]:
        """As the pool does it; what the verifier computes on the way is kept in the cache. Raises ExtractionError."""

        def ask(name: str) -> tuple[list[int], Tensor]:
            answers.append(self.pool.complete(prompt, max_tokens, sample=name, **sampling))
            token_ids = [*prompt, *answers[0][0]][:-1]
            return token_ids, self.buffer(len(token_ids))

        answers: list[tuple[list[int], str]] = []
        try:
            self._keep(*self._attempt(f"{next(self._sequence)}/0", len(prompt) + max_tokens, ask))
        except StoreError as error:
            raise ExtractionError(error.cause, str(error)) from None
        return answers[0]

    def has(self, token_ids: list[int]) -> bool:
        """Whether the cache holds what `obtain` needs."""
        return self.cache.has(self.contract, token_ids) or self.cache.has(self.contract, token_ids[:-1])

    def traffic(self) -> dict[str, float]:
        """Since the last call: bytes fetched, and seconds that threads waited for room, for the extractor, and fetched; beside them
        what the store holds now."""
        now = self.meter.copy()
        since, self._told = {what: now[what] - self._told[what] for what in now}, now
        with suppress(Gone):
            usage = self.store.usage()
            since |= {"objects": usage.keys, "bytes": usage.bytes}
        return since

    def close(self) -> None:
        self.store.close()

    def _cached(self, token_ids: list[int], out: Tensor) -> bool:
        """What a rollout left lacks the last token's state, which no slot's context or teacher is: zeros will do."""
        if self.cache.get_into(self.contract, token_ids, out):
            return True
        out[-1:] = 0
        return len(token_ids) > 1 and self.cache.get_into(self.contract, token_ids[:-1], out[:-1])

    def _attempt(self, number: str, tokens: int, ask: Callable[[str], tuple[list[int], Tensor]]) -> tuple[list[int], Tensor]:
        """Have a sample published under a name of its own, by `ask`, which says what it is of and where it belongs; fetch it, remove it.

        Raises ExtractionError, StoreError.
        """
        name, size = f"{self.run}/{self.rank}/{number}", MANIFEST_BYTES[0] + tokens * (self._row_bytes() + MANIFEST_BYTES[1])
        manifest = None
        with self._timed("room_s"):
            self.gate.acquire(size)
        try:
            with self._timed("make_s"):
                token_ids, out = ask(name)
            with self._timed("fetch_s"):
                manifest = fetch(self.store, name, self.contract, token_ids, out)
            self.meter["fetched_bytes"] += out.nbytes
            return token_ids, out
        finally:
            try:
                discard(self.store, name, manifest)
            except Gone:  # it has lost its consumer, and the store sweeps such
                self.retries["left_behind"] += 1
            self.gate.release(size)

    def _row_bytes(self) -> int:
        return (len(self.contract.taps) + 1) * self.width * getattr(torch, self.contract.dtype).itemsize

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.meter[what] += time.monotonic() - began

    def _keep(self, token_ids: list[int], states: Tensor) -> None:
        """Put fetched states into the durable cache; one that cannot hold them costs a prefill later and nothing now."""
        if self.cache:
            try:
                self.cache.put(self.contract, token_ids, states)
            except Full:
                self.retries["cache_full"] += 1


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
