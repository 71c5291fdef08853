"""The data feed of one rank: it asks for states ahead of need, lands them in packed batches, and keeps the order.

Flow control is local: a rank owns `store.bytes / world` of the store and never has more asked for. A sample is taken from
the durable cache where it is there; else an extractor makes it, it is fetched, checked, and removed from the store.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property

import torch
from datasets import Dataset
from torch import Tensor

from configs.schema import Config
from extract.pool import HOPELESS, ExtractionError, Pool
from store.cache import DurableCache
from store.contract import StateContract
from store.objects import Full, Gone, ObjectStore, StoreError, open_store, run_prefix
from store.sample import MAX_PARTS, bytes_of, checksum, discard, fetch
from train.batch import Batch, Document, Sample, block_size_at, lay_out, pack, place, total_steps

AWAY = frozenset({"no_room", "store_gone", "no_extractor", "unreachable", "draining"})  # causes that pass: full, or being restarted
OF_THE_SAMPLE = HOPELESS | {"non_finite"}  # causes that cost the sample and not the run
MANIFEST_BYTES = 4096, 12  # of a sample, and of each of its token ids, at most


class FeedError(RuntimeError):
    """States cannot be had any more; the message says why."""


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


class Buffers:
    """Memory that batches land in, [tokens, m + 1, H] each: registered with the store once, pinned beside a GPU, used again."""

    def __init__(self, store: ObjectStore, shape: tuple[int, int, int], dtype: torch.dtype):
        self.store, self.shape, self.dtype = store, shape, dtype
        self.free: list[Tensor] = []
        self.lent: dict[int, Tensor] = {}

    def take(self, tokens: int) -> Tensor:
        """[tokens, m + 1, H] of any values; more tokens than usual get memory of their own."""
        if not 0 < tokens <= self.shape[0]:
            return torch.empty((tokens, *self.shape[1:]), dtype=self.dtype)
        if not self.free:
            self.free.append(torch.empty(self.shape, dtype=self.dtype, pin_memory=torch.cuda.is_available()))
            self.store.register(bytes_of(self.free[0]))
        whole = self.free.pop()
        self.lent[whole.data_ptr()] = whole
        return whole[:tokens]

    def give(self, states: Tensor) -> None:
        """Take back what nobody uses any more."""
        if (whole := self.lent.pop(states.data_ptr(), None)) is not None:
            self.free.append(whole)


class Feed:
    """`batches(first)` yields this rank's micro-steps from step `first` on; every step ends with a batch marked `last`. All ranks
    have the same number of them: where a rank has less to do, the last ones are empty. A batch's memory is used again once the
    next one is asked for."""

    contract: StateContract  # set once the handshake has passed

    def __init__(self, dataset: Dataset, config: Config, hidden_size: int, pool: Pool, rank: int, world: int):
        self.dataset, self.config, self.pool = dataset, config, pool
        self.row_shape = (len(config.draft.taps) + 1, hidden_size)
        self.rank, self.world = rank, world
        self.store = open_store(config.store)
        self.cache = DurableCache(config.store.cache_path, config.store.cache_bytes) if config.store.keep else None
        self.gate = ByteGate(config.store.bytes // world)
        self.run = run_prefix(config.run_dir) + uuid.uuid4().hex[:8]  # attempts of an earlier launch can never be mistaken for ours
        self.drops: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.meter: Counter[str] = Counter()  # bytes fetched, seconds of threads: waiting for room, for the extractor, fetching
        self._told: Counter[str] = Counter()
        self.total = total_steps(len(dataset), config)
        self.executor = ThreadPoolExecutor(config.pool.in_flight, thread_name_prefix="feed")
        self._sequence = itertools.count()

    def close(self) -> None:
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    def traffic(self) -> dict[str, float]:
        """Since the last call: bytes fetched, and seconds that threads waited for room, for the extractor, and fetched; beside them
        what the store holds now."""
        now = self.meter.copy()
        since, self._told = now - self._told, now
        with suppress(Gone):
            usage = self.store.usage()
            since |= {"objects": usage.keys, "bytes": usage.bytes}
        return dict(since)

    def sample(self, row: int) -> Sample:
        record = self.dataset[int(row)]
        return Sample(int(row), record["input_ids"], record["loss_mask"])

    def states(self, sample: Sample) -> Tensor | None:
        """States [T, m + 1, H] of a sample outside the order; None if they cannot be made."""
        out = self.buffers.take(len(sample.token_ids))
        states = out.clone() if self.obtain(sample, out, next(self._sequence)) else None
        self.buffers.give(out)
        return states

    @cached_property
    def buffers(self) -> Buffers:
        tokens = max(self.config.train.micro_tokens, self.config.data.length)
        return Buffers(self.store, (tokens, *self.row_shape), getattr(torch, self.contract.dtype))

    def batches(self, first: int) -> Iterator[Batch]:
        planned = self._plan(first)
        pending: deque[tuple[Batch, list[Future]]] = deque()
        ahead = 0
        while True:
            while ahead < self.config.pool.look_ahead and (batch := next(planned, None)) is not None:
                pending.append((batch, [self._start(batch, document) for document in batch.documents]))
                ahead += max(1, len(batch.documents))
            if not pending:
                return
            batch, futures = pending.popleft()
            ahead -= max(1, len(batch.documents))
            made = [future.result() for future in futures]
            for document, ok in zip(batch.documents, made, strict=True):
                if not ok:  # whatever lies there could be infinite, which a gradient of zero does not heal
                    batch.states[document.start : document.stop] = 0
            batch.documents = [document for document, ok in zip(batch.documents, made, strict=True) if ok]
            yield batch
            self.buffers.give(batch.states)  # whatever was made of it has been computed: a step's stopwatch waits for the device

    def _plan(self, first: int) -> Iterator[Batch]:
        for step in range(first, self.total):
            where = place(step, len(self.dataset), self.config)
            shares = [[self.sample(row) for row in where.rows[rank :: self.world]] for rank in range(self.world)]
            packed = [pack(samples, self.config.train.micro_tokens) for samples in shares]
            groups = packed[self.rank] + [[]] * (max(map(len, packed)) - len(packed[self.rank]))
            for number, group in enumerate(groups, 1):
                documents = lay_out(group, where.epoch, block_size_at(step, self.total, self.config), self.config)
                yield Batch(step, documents, self.buffers.take(sum(len(s.token_ids) for s in group)), last=number == len(groups))

    def _start(self, batch: Batch, document: Document) -> Future:
        return self.executor.submit(self._fill, document, batch.states[document.start : document.stop], next(self._sequence))

    def _fill(self, document: Document, out: Tensor, sequence: int) -> bool:
        made = self.obtain(document.sample, out, sequence)
        if made:
            document.checksum = checksum(bytes_of(out)) & 0xFFFFFFFF
        return made

    def obtain(self, sample: Sample, out: Tensor, sequence: int) -> bool:
        """Fill `out` [T, m + 1, H] with the sample's states. False if the sample cannot be made (counted in `drops`).

        Raises FeedError once `pool.attempts` attempts have failed for a reason that is not the sample's own, or what makes or
        keeps states has been away for `pool.deadline_s`.
        """
        token_ids = sample.token_ids.tolist()
        if self.cache and self.cache.get_into(self.contract, token_ids, out):
            return True
        failures, patience = 0, time.monotonic() + self.config.pool.deadline_s
        for attempt in itertools.count():
            failure = self._attempt(f"{self.run}/{self.rank}/{sequence}/{attempt}", token_ids, out)
            if failure is None:
                self._keep(token_ids, out)
                return True
            self.retries[failure.cause] += 1
            if failure.cause not in AWAY or time.monotonic() > patience:
                failures += 1
            if failure.cause in HOPELESS or failures == self.config.pool.attempts:
                break
            time.sleep(min(5.0, 0.1 * 2 ** min(attempt, 6)))
        if failure.cause in OF_THE_SAMPLE:
            self.drops[failure.cause] += 1
            return False
        raise FeedError(f"sample {sample.row}: {attempt + 1} attempts failed, the last one: {failure.cause}: {failure}")

    def _attempt(self, name: str, token_ids: list[int], out: Tensor) -> ExtractionError | StoreError | None:
        """Have states made under a name of their own, fetch them, remove them; returns why that failed."""
        size = out.nbytes + MANIFEST_BYTES[0] + MANIFEST_BYTES[1] * len(token_ids)
        with self._timed("room_s"):
            self.gate.acquire(size)
        parts = MAX_PARTS
        try:
            with self._timed("make_s"):
                self.pool.make(name, token_ids)
            with self._timed("fetch_s"):
                parts = len(fetch(self.store, name, self.contract, token_ids, out).slices)
            self.meter["fetched_bytes"] += out.nbytes
        except (ExtractionError, StoreError) as error:
            return error
        finally:
            self._discard(name, parts)
            self.gate.release(size)

    def _discard(self, name: str, parts: int) -> None:
        """Remove a sample; one that cannot be removed now has lost its consumer, and the store sweeps such."""
        try:
            discard(self.store, name, parts)
        except Gone:
            self.retries["left_behind"] += 1

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
