"""The training run of one rank, from handshake to last checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.schema import Config
from extract.capture import RECORD, Captured
from extract.obtain import NoStates, StateSource
from extract.pool import ExtractionError, Pool
from store.contract import Contract, ContractMismatch, DataContract, StateContract, require_same
from store.dataset import Dataset
from train import checkpoint
from train.batch import Batch, Order, Place, block_size_at, checkpoint_interval, end_step, place
from train.contract import DraftContract
from train.draft import Draft, initialise
from train.feed import Feed
from train.handshake import Example, from_cache, from_engine, handshake
from train.log import Log, Stopwatch, summarise
from train.optimizer import build_optimizers, set_learning_rate
from train.step import SUMS, run
from train.validate import held_out, validate, whole
from train.verifier import FrozenVerifier
from train.visited import put_on_walk
from train.warmstart import warm_start
from train.world import World, world

WARM_START_SAMPLES = 8  # whose states show the scales of the taps


@dataclass
class Run:
    """What a step works with."""

    config: Config
    world: World
    feed: Feed
    draft: Draft
    frozen: FrozenVerifier
    contracts: dict[str, Contract]


def train(config: Config, from_draft: Path | None = None, stop: Callable[[], bool] = lambda: False) -> None:
    """Train a draft as `config` says, or go on from the run's latest checkpoint; every rank of a torchrun world calls it.

    from_draft: a checkpoint or a published draft whose weights a new run starts from. `stop` is asked after each step: true on any
    rank, and there is a checkpoint and an end. `config.finished` is written after the last step's checkpoint only.
    Raises ContractMismatch (the engine, the data, the checkpoint or the draft are not what the recipe means), FormatError, NoStates.
    """
    with world(config.train.stuck_s) as ranks:
        torch.set_num_threads(config.train.threads)
        torch.set_float32_matmul_precision("high")
        dataset = Dataset(config.data.path)
        spec = DraftContract.resolve(config)
        draft = _draft(config, spec, from_draft)
        dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
        frozen = FrozenVerifier.load(config.verifier.path, dtype, ranks.device, draft.kept)
        source = StateSource(config, Pool(config), ranks.rank, ranks.size, keep=config.store.keep)
        feed = Feed(dataset, config, source, ranks.rank, ranks.size)
        try:
            _agree(config, ranks, source, frozen, dataset)
            data = DataContract.read(config.data.path / "data_contract.json")
            contracts = {"draft": spec, "states": source.contract, "data": data}
            if config.rounds is None:  # each round has samples of its own
                contracts["order"] = Order.of(dataset, config)
            training = Run(config, ranks, feed, draft.to(ranks.device), frozen, contracts)
            found = checkpoint.latest(config.run_dir / "checkpoints")
            first = checkpoint.resume(found, draft, contracts) if found else _start(training, dataset, warm=from_draft is None)
            if config.train.parallel == "fsdp" and ranks.size > 1:
                ranks.shard(draft)
            optimizers = build_optimizers(draft, config.train, ranks)
            if found:
                checkpoint.resume_optimizers(found, optimizers)
            _steps(training, optimizers, first, stop)
        finally:
            feed.close()


def _draft(config: Config, spec: DraftContract, from_draft: Path | None) -> Draft:
    """A draft as the recipe means it: random, or with the weights of `from_draft`, whose shape must be the same."""
    if from_draft is None:
        draft = Draft(spec)
        initialise(draft, config.seed)
        if spec.reduced:
            draft.kept.copy_(_draft_vocabulary(config, spec))
        return draft
    draft = checkpoint.load_draft(from_draft)
    free = {"loss_terms": spec.loss_terms, "block_size": spec.block_size, "max_position_embeddings": spec.max_position_embeddings}
    require_same(spec, draft.spec.model_copy(update=free), f"{from_draft}: draft contract")
    draft.spec = spec
    return draft


def _draft_vocabulary(config: Config, spec: DraftContract) -> Tensor:
    """Token ids, ascending, of a reduced draft vocabulary, which data preparation counted."""
    file = config.data.path / "draft_vocabulary.npy"
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: prepare the data with draft.draft_vocab_size = {spec.draft_vocab_size}")
    kept = torch.from_numpy(np.load(file)).long()
    if len(kept) != spec.draft_vocab_size:
        raise ContractMismatch(f"{file}: draft.draft_vocab_size: {spec.draft_vocab_size} here, {len(kept)} there")
    return kept


def _agree(config: Config, ranks: World, source: StateSource, frozen: FrozenVerifier, dataset: Dataset) -> None:
    """Rank 0 shakes hands with the engine; all get its state contract, or the reason why there is none.

    Without an extractor, the record of a data set that was captured stands for it.
    """
    contract = refusal = None
    if ranks.rank == 0:
        try:
            source.contract, examples = _examples(config, source, dataset)
            handshake(config, source.contract, frozen, examples)
            contract = source.contract
        except ContractMismatch as error:
            refusal = str(error)
    contract, refusal = ranks.object_from_rank_0((contract, refusal))
    if refusal:
        raise ContractMismatch(f"handshake: {refusal}")
    source.contract, frozen.last = contract, contract.last


def _examples(config: Config, source: StateSource, dataset: Dataset) -> tuple[StateContract, Iterator[Example]]:
    captured = config.data.path / RECORD
    try:
        contract = source.pool.contract()
    except ExtractionError:
        if not (config.store.keep and captured.exists()):
            raise
        record = Captured.model_validate_json(captured.read_text())
        return record.contract, from_cache(source, record)
    prompts = (record["input_ids"][: max(1, int(record["loss_mask"].argmax()))].tolist() for record in dataset)
    return contract, from_engine(source, islice(prompts, 64))


def _start(training: Run, dataset: Dataset, warm: bool) -> int:
    """Weights of a new run: rank 0's, after its warm start. Returns step 0."""
    if training.world.rank == 0 and warm:
        warm_start(training.draft, training.frozen, dataset, _first_states(training), training.config)
    training.world.from_rank_(training.draft.state_dict().values())
    return 0


def _first_states(training: Run) -> Tensor:
    """States [T, m + 1, H] of the first samples of the global order. Raises NoStates if none of them could be made."""
    rows = place(0, len(training.feed.dataset), training.config).rows[:WARM_START_SAMPLES]
    parts = [states for row in rows if (states := training.feed.states(training.feed.sample(row))) is not None]
    if not parts:
        raise NoStates(f"warm start: none of the samples {rows.tolist()} could be made: {dict(training.feed.source.drops)}")
    return torch.cat(parts)


def _steps(training: Run, optimizers: list[torch.optim.Optimizer], first: int, stop: Callable[[], bool]) -> None:
    """All steps from `first` on: sums are raw until the normaliser of the whole step is known, on all ranks alike."""
    config, ranks, total = training.config, training.world, training.feed.total
    end, log = end_step(total, config), Log(config.run_dir, total, config.train.log_every) if ranks.rank == 0 else None
    if log:
        print(f"handshake passed; {end - first} of {total} steps to go, {config.train.global_batch} samples each", flush=True)
    batches = training.feed.batches(first)
    parameters = list(training.draft.parameters())
    held, record = held_out(config) if config.train.validate_every else None, log.best(first) if log else 0.0
    milestones = {max(1, round(share * total)) for share in config.train.milestones}
    every, done = checkpoint_interval(len(training.feed.dataset), config), first
    for step in range(first, end):
        watch = Stopwatch(ranks.device)
        lr = set_learning_rate(optimizers, step, total, config.train)
        where = place(step, len(training.feed.dataset), config)
        sums, checksums = _accumulate(training, batches, where, block_size_at(step, total, config), watch)
        local = (parameter.grad for parameter in parameters if not isinstance(parameter, DTensor))  # the others are sums
        asked = torch.tensor(float(stop()))
        ranks.sum_([sums, asked, checksums, *local])
        normaliser = float(sums[1])
        if normaliser > 0:  # else no rank had a valid slot: the step is counted and changes nothing
            for parameter in parameters:
                parameter.grad.div_(normaliser)
            torch.nn.utils.clip_grad_norm_(parameters, config.train.clip)
            for optimizer in optimizers:
                optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        watch.mark("optimizer")
        done = step + 1
        if log:
            means = summarise(sums[1 : 1 + len(SUMS)], sums[1 + len(SUMS) :].view(2, -1), float(sums[0]))
            trouble = {"drops": dict(training.feed.source.drops), "retries": dict(training.feed.source.retries)}
            if done % config.train.log_every == 0:
                trouble["store"] = training.feed.source.traffic()
            made = [f"{check:08x}" for check in checksums.tolist()]
            log.step({"step": done, **means, "lr": lr, "states": made, "seconds": watch.seconds, **trouble})
        best = False
        if held is not None and (done % config.train.validate_every == 0 or done == end):
            values = validate(training.draft, training.frozen, training.feed, held, ranks, config)
            if log:
                log.validation({"step": done, **values})
                best, record = values["tokens_per_forward"] > record, max(record, values["tokens_per_forward"])
            best = ranks.object_from_rank_0(best)
        if best or done % every == 0 or done == end or done in milestones or asked:
            weights, *states = training.draft.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)
            root = config.run_dir / "checkpoints"
            checkpoint.save(root, done, weights, states, training.contracts, config, ranks.rank, best, milestones)
        if asked:
            break
    if log:
        if done == end:
            config.finished.write_text(json.dumps({"step": done}))
        log.close()


def _accumulate(training: Run, batches: Iterator[Batch], where: Place, block_size: int, watch: Stopwatch) -> tuple[Tensor, Tensor]:
    """Backward through this rank's micro-steps of one step, which lies in the data at `where`.

    Returns [objective, counts, per slot] as one fp64 vector, and int64 checksums of the states of those samples that are this rank's.
    """
    device, last, config = training.world.device, False, training.config
    walker = whole(training.draft, device) if config.train.anchors == "walk" else None
    sums = torch.zeros(1 + len(SUMS) + 2 * block_size, dtype=torch.float64)
    checksums = torch.zeros(len(where.rows), dtype=torch.int64)
    while not last:
        batch = next(batches)
        watch.mark("fetch")
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            if walker is not None:
                put_on_walk(walker, training.frozen, batch, where.epoch, block_size, config)
            part = run(training.draft, training.frozen, batch, block_size, config.loss, device)
        watch.mark("forward")
        part.objective.backward()
        watch.mark("backward")
        sums += torch.cat((part.objective.detach().double().cpu()[None], part.counts, part.per_slot.flatten()))
        for document in batch.documents:
            checksums[torch.from_numpy(where.rows == document.sample.row)] = document.checksum
        last = batch.last
    return sums, checksums
