"""The `transformers` engine: one thread that owns the verifier and serves what is asked of it in batches.

Asks for states are prefilled together and published one by one. Asks for text live in the slots of one KV cache, which they
join and leave while the others go on decoding: rows 0..n-1 are always the running ones.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from configs.schema import Config
from extract.hf import HFVerifier
from extract.pool import ExtractionError
from extract.protocol import Body, check_prompt
from store.objects import ObjectStore, StoreError
from store.sample import put_sample

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Ask:
    """One request: for a continuation of its prompt, or for its states. Its answer is token ids, and why they end: "stop" or "length"."""

    body: Body
    answer: Future[tuple[list[int], str]] = field(default_factory=Future)
    abandoned: bool = False  # set by whoever asked: nobody waits any more

    def fail(self, cause: str, message: str) -> None:
        self.answer.set_exception(ExtractionError(cause, message))


@dataclass(eq=False)
class Row:
    """A running completion: the token that goes in next, and what has come out."""

    ask: Ask
    token: int
    generator: torch.Generator
    response: list[int] = field(default_factory=list)


class TransformersEngine:
    """Runs the verifier of a recipe. `submit` may be called from any thread."""

    def __init__(self, config: Config, store: ObjectStore):
        self.settings, self.store, self.seed = config.extract, store, config.seed
        verifier = config.verifier
        self.verifier = HFVerifier(verifier.path, verifier.dtype, config.draft.taps, verifier.trust_remote_code)
        self.contract = self.verifier.contract.model_copy(update={"codec": config.store.codec})
        self.counts: Counter[str] = Counter()  # tokens made and generated, samples, completions: for the progress line
        self._asks: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._samples: deque[Ask] = deque()
        self._prompts: deque[Ask] = deque()
        self._rows: list[Row] = []
        self._stopped = False
        row_bytes = self.verifier.token_bytes() * self.settings.max_model_len
        rows = max(1, min(self.settings.batch_size, self.settings.kv_bytes // row_bytes))
        if rows < self.settings.batch_size:
            log.info("%d rows are decoded together: a row of extract.max_model_len takes %d MB of extract.kv_bytes", rows, row_bytes >> 20)
        self._slots = self.verifier.slots(rows, self.settings.max_model_len)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, ask: Ask) -> None:
        """Take an ask; its answer comes later. Raises ExtractionError (bad_request, too_long, unknown_tokens) at once."""
        if self._stopped:
            raise ExtractionError("draining", "the extractor has stopped")
        check_prompt(ask.body.prompt, ask.body.max_tokens, self.settings.max_model_len, self.verifier.vocab_size)
        self._asks.put(ask)

    def alive(self) -> bool:
        return self._thread.is_alive()

    def waiting(self) -> int:
        return self._asks.qsize() + len(self._samples) + len(self._prompts)

    def stop(self) -> None:
        """End after the batch that runs now; what is not answered by then is refused as `draining`."""
        self._stopped = True
        self._asks.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self.settings.threads)  # a thread's own setting, under OpenMP
        while self._receive():
            self._serve()
        for ask in [*(row.ask for row in self._rows), *self._prompts, *self._samples]:
            ask.fail("draining", "the extractor stopped before it was done (extract.drain_s)")

    def _serve(self) -> None:
        """One batch of each kind."""
        if batch := self._take(self._samples, self.settings.batch_size):
            with _answering(batch):
                self._make(batch)
        if batch := self._take(self._prompts, len(self._slots.lengths) - len(self._rows)):
            with _answering(batch):
                self._admit(batch)
        if self._rows:
            with _answering([row.ask for row in self._rows]):
                self._decode()
            self._rows = [row for row in self._rows if not row.ask.answer.done()]  # all gone where decoding failed

    def _receive(self) -> bool:
        """Sort new asks; sleeps while there is nothing to do. False: the engine was closed."""
        while True:
            idle = not (self._samples or self._prompts or self._rows)
            try:
                ask = self._asks.get(block=idle)
            except queue.Empty:
                return True
            if ask is None:
                return False
            (self._prompts if ask.body.sample is None else self._samples).append(ask)

    def _take(self, asks: deque[Ask], rows: int) -> list[Ask]:
        """The next asks of one batch, in order: up to `rows` rows and `extract.batch_tokens` tokens with padding, at least one."""
        batch, longest = [], 0
        while asks and len(batch) < rows:
            if asks[0].abandoned:
                asks.popleft().fail("abandoned", "nobody waits for it")
                continue
            longest = max(longest, len(asks[0].body.prompt))
            if batch and longest * (len(batch) + 1) > self.settings.batch_tokens:
                break
            batch.append(asks.popleft())
        return batch

    def _make(self, batch: list[Ask]) -> None:
        for ask, states in zip(batch, self.verifier.prefill([ask.body.prompt for ask in batch])):
            try:
                self._publish(ask, states)
            except (ExtractionError, StoreError) as error:
                ask.fail(error.cause, str(error))
            else:
                self.counts.update(samples=1, tokens_made=len(states))
                ask.answer.set_result(([], "length"))

    def _publish(self, ask: Ask, states: Tensor) -> None:
        """Put one sample, so that it is complete or leaves nothing. Raises ExtractionError, StoreError."""
        if ask.abandoned:
            raise ExtractionError("abandoned", "nobody waits for it")
        try:
            put_sample(self.store, ask.body.sample, self.contract, ask.body.prompt, states)
        except ValueError as error:  # the name is taken or is none; whoever has it keeps it
            raise ExtractionError("bad_request", str(error)) from None

    def _admit(self, batch: list[Ask]) -> None:
        """Fill the next slots with prompts but for their last tokens, which join the others' decoding step."""
        rows = torch.arange(len(self._rows), len(self._rows) + len(batch))
        lengths = torch.tensor([len(ask.body.prompt) - 1 for ask in batch])
        self._slots.lengths[rows] = 0
        if longest := int(lengths.max()):
            tokens = torch.tensor([ask.body.prompt[:-1] + [0] * (longest + 1 - len(ask.body.prompt)) for ask in batch])
            self.verifier.step(tokens, self._slots, rows, logits=False)
        self._slots.lengths[rows] = lengths
        for ask in batch:
            generator = torch.Generator().manual_seed(self.seed if ask.body.seed is None else ask.body.seed)
            self._rows.append(Row(ask, ask.body.prompt[-1], generator))

    def _decode(self) -> None:
        """One token for every running row; those that end leave their slot to the last one."""
        tokens = torch.tensor([[row.token] for row in self._rows])
        logits, _ = self.verifier.step(tokens, self._slots, torch.arange(len(self._rows)))
        logits = logits[:, 0]
        finite = logits.isfinite().all(-1).tolist()
        best = logits.argmax(-1).tolist()
        self.counts["tokens_generated"] += len(self._rows)
        for index in reversed(range(len(self._rows))):
            row = self._rows[index]
            if not finite[index]:
                self._slots.clear_row(index)
                row.ask.fail("non_finite", "the verifier's logits are not finite")
            else:
                row.token = _draw(logits[index], row) if row.ask.body.temperature else best[index]
                row.response.append(row.token)
                self._end(row)
            if row.ask.answer.done():
                last = len(self._rows) - 1
                if index != last:
                    self._slots.copy_row(last, index)
                self._rows[index] = self._rows[last]
                self._rows.pop()

    def _end(self, row: Row) -> None:
        """Answer a row that has come to its end."""
        stopped = row.token in self.verifier.stop_ids
        if row.ask.abandoned:
            row.ask.fail("abandoned", "nobody waits for it")
        elif stopped or len(row.response) == row.ask.body.max_tokens:
            self.counts["completions"] += 1
            row.ask.answer.set_result((row.response, "stop" if stopped else "length"))


@contextmanager
def _answering(batch: list[Ask]) -> Iterator[None]:
    """Whatever goes wrong with a batch is told to those who asked, and the engine goes on with the next."""
    try:
        yield
    except Exception as error:
        log.exception("a batch of %d failed", len(batch))
        for ask in batch:
            if not ask.answer.done():
                ask.fail("engine", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _draw(logits: Tensor, row: Row) -> int:
    """Sample from logits [V] with the row's own random numbers, so that an answer does not depend on its neighbours."""
    p, order = (logits.double() / row.ask.body.temperature).softmax(-1).sort(descending=True)
    p[row.ask.body.top_k or len(p) :] = 0
    p[p.cumsum(-1) - p >= row.ask.body.top_p * p.sum()] = 0  # the likeliest that together reach top_p, of what top_k left
    return int(order[torch.multinomial(p, 1, generator=row.generator)])
