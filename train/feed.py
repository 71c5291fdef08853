"""The data feed of one rank: it asks for states ahead of need, lands them in packed batches, and keeps the order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import torch
from torch import Tensor

from configs.schema import Config
from extract.obtain import StateSource
from store.dataset import Dataset
from store.objects import ObjectStore
from store.sample import bytes_of, checksum
from train.batch import Batch, Document, Sample, block_size_at, end_step, lay_out, pack, place, total_steps


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

    def __init__(self, dataset: Dataset, config: Config, source: StateSource, rank: int, world: int):
        self.dataset, self.config, self.source = dataset, config, source
        self.rank, self.world = rank, world
        self.total = total_steps(len(dataset), config)
        self.executor = ThreadPoolExecutor(config.pool.in_flight, thread_name_prefix="feed")

    def close(self) -> None:
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.source.close()

    def sample(self, row: int) -> Sample:
        record = self.dataset[int(row)]
        return Sample(int(row), record["input_ids"], record["loss_mask"])

    def states(self, sample: Sample) -> Tensor | None:
        """States [T, m + 1, H] of a sample outside the order; None if they cannot be made."""
        out = self.buffers.take(len(sample.token_ids))
        states = out.clone() if self.source.obtain(sample.token_ids.tolist(), out) else None
        self.buffers.give(out)
        return states

    @cached_property
    def buffers(self) -> Buffers:
        tokens = max(self.config.train.micro_tokens, self.config.data.length)
        shape = (tokens, len(self.config.draft.taps) + 1, self.source.width)
        return Buffers(self.source.store, shape, getattr(torch, self.source.contract.dtype))

    def batches(self, first: int) -> Iterator[Batch]:
        planned = self._plan(first)
        pending: deque[tuple[Batch, list[Future]]] = deque()
        ahead = 0
        while True:
            while ahead < self.config.pool.look_ahead and (batch := next(planned, None)) is not None:
                pending.append((batch, [self.executor.submit(self._fill, batch, document) for document in batch.documents]))
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
        for step in range(first, end_step(self.total, self.config)):
            where = place(step, len(self.dataset), self.config)
            shares = [[self.sample(row) for row in where.rows[rank :: self.world]] for rank in range(self.world)]
            packed = [pack(samples, self.config.train.micro_tokens) for samples in shares]
            groups = packed[self.rank] + [[]] * (max(map(len, packed)) - len(packed[self.rank]))
            for number, group in enumerate(groups, 1):
                documents = lay_out(group, where.epoch, block_size_at(step, self.total, self.config), self.config)
                yield Batch(documents, self.buffers.take(sum(len(s.token_ids) for s in group)), last=number == len(groups))

    def _fill(self, batch: Batch, document: Document) -> bool:
        out = batch.states[document.start : document.stop]
        made = self.source.obtain(document.sample.token_ids.tolist(), out)
        if made:
            document.checksum = checksum(bytes_of(out)) & 0xFFFFFFFF
        return made
