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

import torch
from datasets import Dataset
from torch import Tensor

from configs.schema import Config
from extract.pool import HOPELESS, ExtractionError, Pool
from store.cache import DurableCache
from store.contract import StateContract
from store.objects import Full, StoreError, open_store
from store.sample import discard, fetch
from train.batch import Batch, Sample, block_size_at, lay_out, pack, place, total_steps

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


class Feed:
    """`batches(first)` yields this rank's micro-steps from step `first` on; every step ends with a batch marked `last`,
    which is empty if the rank has nothing in that step."""

    contract: StateContract  # set once the handshake has passed

    def __init__(self, dataset: Dataset, config: Config, hidden_size: int, pool: Pool, rank: int, world: int):
        self.dataset, self.config, self.pool = dataset, config, pool
        self.row_shape = (len(config.draft.taps) + 1, hidden_size)
        self.rank, self.world = rank, world
        self.store = open_store(config.store)
        self.cache = DurableCache(config.store.cache_path, config.store.cache_bytes) if config.store.keep else None
        self.gate = ByteGate(config.store.bytes // world)
        self.run = uuid.uuid4().hex[:12]  # attempts of an earlier launch can never be mistaken for ours
        self.drops: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.total = total_steps(len(dataset), config)
        self.executor = ThreadPoolExecutor(config.pool.in_flight, thread_name_prefix="feed")
        self._sequence = itertools.count()

    def close(self) -> None:
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    def sample(self, row: int) -> Sample:
        record = self.dataset[int(row)]
        return Sample(int(row), record["input_ids"], record["loss_mask"])

    def states(self, row: int) -> Tensor | None:
        """States [T, m + 1, H] of one row of the data set, outside the order; None if they cannot be made."""
        sample = self.sample(row)
        out = self._buffer(len(sample.token_ids))
        return out if self.obtain(sample, out, next(self._sequence)) else None

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
            batch.documents = [document for document, ok in zip(batch.documents, made, strict=True) if ok]
            yield batch

    def _plan(self, first: int) -> Iterator[Batch]:
        for step in range(first, self.total):
            where = place(step, len(self.dataset), self.config)
            samples = [self.sample(row) for row in where.rows[self.rank :: self.world]]
            groups = pack(samples, self.config.train.micro_tokens) or [[]]
            for number, group in enumerate(groups, 1):
                documents = lay_out(group, where.epoch, block_size_at(step, self.total, self.config), self.config)
                yield Batch(step, documents, self._buffer(sum(len(s.token_ids) for s in group)), last=number == len(groups))

    def _buffer(self, tokens: int) -> Tensor:
        pinned = torch.cuda.is_available()
        return torch.empty((tokens, *self.row_shape), dtype=getattr(torch, self.contract.dtype), pin_memory=pinned)

    def _start(self, batch: Batch, document) -> Future:
        out = batch.states[document.start : document.stop]
        return self.executor.submit(self.obtain, document.sample, out, next(self._sequence))

    def obtain(self, sample: Sample, out: Tensor, sequence: int) -> bool:
        """Fill `out` [T, m + 1, H] with the sample's states. False if the sample cannot be made (counted in `drops`).

        Raises FeedError once `pool.attempts` attempts have failed for a reason that is not the sample's own.
        """
        token_ids = sample.token_ids.tolist()
        if self.cache and self.cache.get_into(self.contract, token_ids, out):
            return True
        size = out.nbytes + MANIFEST_BYTES[0] + MANIFEST_BYTES[1] * len(token_ids)
        for attempt in range(self.config.pool.attempts):
            name = f"{self.run}/{self.rank}/{sequence}/{attempt}"
            self.gate.acquire(size)
            try:
                self.pool.make(name, token_ids)
                fetch(self.store, name, self.contract, token_ids, out)
            except (ExtractionError, StoreError) as error:
                failure = error
                self.retries[error.cause] += 1
            else:
                failure = None
            finally:
                discard(self.store, name)
                self.gate.release(size)
            if failure is None:
                self._keep(token_ids, out)
                return True
            if failure.cause in HOPELESS:
                break
            time.sleep(min(5.0, 0.1 * 2**attempt))
        if failure.cause in OF_THE_SAMPLE:
            self.drops[failure.cause] += 1
            return False
        raise FeedError(f"sample {sample.row}: {self.config.pool.attempts} attempts failed, the last one: {failure.cause}: {failure}")

    def _keep(self, token_ids: list[int], states: Tensor) -> None:
        """Put fetched states into the durable cache; one that cannot hold them costs a prefill later and nothing now."""
        if self.cache:
            try:
                self.cache.put(self.contract, token_ids, states)
            except Full:
                self.retries["cache_full"] += 1
