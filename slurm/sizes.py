"""What follows from a recipe by arithmetic: topology, bytes, memory and rates of a run."""

from __future__ import annotations

import json
import math
from functools import cached_property
from pathlib import Path

from configs.schema import Config
from store.dataset import Dataset
from store.record import record_bytes
from store.verifier import INDEX, SINGLE, VerifierError, find_file, text_config
from train.contract import DraftContract, shapes

MANIFEST_BYTES = 1024, 7  # about: of a sample, and of each of its token ids
ITEM = {"float32": 4, "bfloat16": 2}  # bytes
MEASURED = 200  # last steps of a run that say how fast it is


class Facts:
    """What follows from a recipe. `verifier`: its config.json, as far as that can be read here. Sizes are in bytes.

    Raises VerifierError where the recipe leaves dimensions to a verifier that cannot be read.
    """

    def __init__(self, config: Config):
        extract, launch, pool, store = config.extract, config.launch, config.pool, config.store
        self.config, self.spec = config, DraftContract.resolve(config)
        try:
            self.verifier = text_config(config.verifier.path)
        except VerifierError:
            self.verifier = {}
        given = {"num_hidden_layers": config.plan.layers, "num_attention_heads": config.plan.heads}
        self.verifier |= {key: value for key, value in given.items() if value}
        self.nodes = launch.extractors * extract.nodes + launch.trainer_nodes if launch.trainer_nodes else 1
        self.ranks = launch.trainers * max(1, launch.trainer_nodes)
        item, planes, width = ITEM[config.verifier.dtype], len(self.spec.taps) + 1, self.spec.hidden_size
        self.token = planes * width * item  # as the engine makes its states
        self.stored_token = record_bytes(store.codec, planes, width, item)
        self.sample = config.data.length * (self.stored_token + MANIFEST_BYTES[1]) + MANIFEST_BYTES[0]  # as long as one may be
        self.step = config.train.global_batch * self.sample
        self.in_flight = min(pool.in_flight, max(1, store.bytes // self.ranks // self.sample))  # samples that a rank has asked for
        self.peak = self.ranks * self.in_flight * self.sample  # of the store
        self.asked = min(extract.batch_size, -(-self.ranks * self.in_flight // max(1, launch.extractors)))  # of one extractor

    @cached_property
    def extractor_memory(self) -> dict[str, int]:
        """Bytes on each of an extractor's GPUs: every rank of the engine holds the blocks of all states."""
        weights = self.config.plan.weights or _weights(self.config.verifier.path)
        return {
            "weights": weights // self.config.extract.tensor_parallel,
            "states in KV blocks": self.asked * self.config.extract.max_model_len * self.token,
        }

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Of the draft: those that the optimizer orthogonalises, and the others."""
        count = {"matrices": 0, "rest": 0}
        for name, shape in shapes(self.spec).items():
            muon = self.config.train.optimizer == "muon" and len(shape) == 2 and min(shape) > 1 and "markov" not in name
            count["matrices" if muon else "rest"] += math.prod(shape)
        return count

    @cached_property
    def trainer_memory(self) -> dict[str, int]:
        """Bytes of one rank, by part; activations are an estimate."""
        spec, train, total = self.spec, self.config.train, sum(self.parameters.values())
        shared = self.ranks if train.parallel == "fsdp" else 1
        item = 2 if self.config.launch.gpus else 4  # bf16 on GPUs
        documents = max(1, train.micro_tokens // self.config.data.length)
        slots = documents * train.num_anchors * spec.block_size
        return {
            "fp32 weights": 4 * total // shared,
            "gradients": 4 * total // shared,
            "optimizer": 4 * self.parameters["matrices"] // self.ranks + 8 * self.parameters["rest"] // shared,  # a matrix has one owner
            "verifier's embedding and head": 2 * item * spec.vocab_size * spec.hidden_size,
            "states": max(train.micro_tokens, self.config.data.length) * (self.token + 4 * len(spec.taps) * spec.hidden_size),
            "logits": self.config.loss.chunk_bytes,
            "activations, about": item * spec.layers * slots * (6 * spec.hidden_size + 4 * spec.intermediate_size),
        }

    @cached_property
    def dataset(self) -> tuple[int, float] | None:
        """Rows, and mean tokens of one."""
        plan, path = self.config.plan, self.config.data.path
        if plan.rows:
            return plan.rows, plan.tokens or self.config.data.length
        if not (path / "state.json").exists():
            return None
        rows = Dataset(path)
        return len(rows), rows.tokens() / len(rows)

    @cached_property
    def rates(self) -> tuple[float | None, float | None]:
        """Tokens/s that all extractors can make, and that all ranks can train on; None: not known."""
        plan, (made, trained) = self.config.plan, _measured(self.config.run_dir / "metrics.jsonl")
        supply = plan.prefill * self.config.launch.extractors if plan.prefill else made
        return supply, plan.training * self.ranks if plan.training else trained


def _measured(metrics: Path) -> tuple[float | None, float | None]:
    """(made, trained) tokens/s by the last steps of a run's log. What waited for nothing does not know how much could be made."""
    if not metrics.exists():
        return None, None
    records = [json.loads(line) for line in metrics.read_text().splitlines()[-MEASURED:]]
    tokens, waiting = sum(record["tokens"] for record in records), sum(record["seconds"]["fetch"] for record in records)
    working = sum(sum(record["seconds"].values()) for record in records) - waiting
    return tokens / (working + waiting) if waiting > working / 10 else None, tokens / working if working else None


def _weights(verifier: str) -> int:
    """Bytes of a verifier's weights, 0 where they are not at hand."""
    try:
        if index := find_file(verifier, INDEX):
            return json.loads(index.read_text())["metadata"]["total_size"]
        single = find_file(verifier, SINGLE) if Path(verifier).is_dir() else None
        return single.stat().st_size if single else 0
    except VerifierError:
        return 0


def parts_of(sizes: dict[str, int]) -> str:
    return f"{size_of(sum(sizes.values()))}: " + ", ".join(f"{what} {size_of(size)}" for what, size in sizes.items())


def size_of(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
