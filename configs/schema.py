"""One typed schema for a whole run: every component reads the same YAML file through `configs.load`.

A section is one class. `null` in a draft's dimensions means "as the verifier". Relative paths are relative to the working
directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Verifier(Section):
    """The large model whose answers are verified: a Hugging Face folder or hub id."""

    path: str
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    trust_remote_code: bool = False
    template: dict[str, bool | int | float | str] = {}  # switches of its chat template, e.g. {enable_thinking: false}
    margin: NonNegativeFloat | None = None  # top-2 gap of logits under which argmax is rounding; null: 1e-3 fp32, 0.25 bf16

    @property
    def rounding(self) -> float:
        return {"float32": 1e-3, "bfloat16": 0.25}[self.dtype] if self.margin is None else self.margin


class Data(Section):
    """The tokenised data set that `extract.prepare_data` writes and training reads."""

    path: Path
    length: PositiveInt = 8192  # tokens a sample
    min_supervised: PositiveInt = 16  # two blocks
    turns: Literal["all", "last"] = "all"  # of the assistant's, that are supervised
    cut: Literal["token", "turn"] = "token"  # where a row that is too long ends
    validation: Fraction = 0.0  # of the prompts, held out by a hash of each
    processes: PositiveInt = 1  # that tokenise


class Rollout(Section):
    """How the verifier answers prompts (`extract.rollout`)."""

    max_tokens: PositiveInt = 1024
    temperature: NonNegativeFloat = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0  # 0: of all tokens
    concurrency: PositiveInt = 32
    states: bool = False  # are made on the way and kept in the durable cache: no prefill of the answers later (the vllm engine)


class Extract(Section):
    """One extractor: the engine that runs the verifier and publishes its states."""

    engine: Literal["transformers", "vllm"] = "transformers"
    host: str = "127.0.0.1"  # where trainers reach it
    threads: PositiveInt = 1
    max_model_len: PositiveInt = 8193  # a sample of `data.length` tokens and the one token that engines insist on generating
    batch_size: PositiveInt = 32  # rows decoded together
    kv_bytes: PositiveInt = 4 << 30  # of their KV cache (the transformers engine): fewer rows where each may be long
    batch_tokens: PositiveInt = 2048  # prefilled together
    drain_s: NonNegativeFloat = 30.0
    # Of the vllm engine only.
    tensor_parallel: PositiveInt = 1
    nodes: PositiveInt = 1  # that one extractor spans
    writers: PositiveInt = 1  # threads of each rank that put states
    flags: dict[str, bool | int | float | str | dict | list] = {}  # of `vllm serve`, e.g. {enforce-eager: true, load-format: auto}
    environment: dict[str, str] = {}  # of the engine's processes

    @field_validator("host")
    @classmethod
    def _one_address(cls, host):
        if host in ("", "0.0.0.0", "::"):
            raise ValueError("trainers cannot be sent to every address: name the one of this machine that they reach")
        return host


class Mooncake(Section):
    """The Mooncake store: a master (`store.master`), and memory of the processes that put."""

    host: str = "127.0.0.1"  # the master's address, on the fabric; each client finds its own by the route to it
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""  # of RDMA, with commas between; empty: Mooncake chooses
    threads: PositiveInt = 8  # of the master
    deadline_s: PositiveInt = 5  # without an answer or a byte from a peer; the call that waits for it fails then
    lease_s: PositiveInt = 60  # longer than the slowest read of one object
    release_s: PositiveInt = 120  # until the space of a put that never ended is used again: longer than the slowest put
    orphan_s: PositiveInt = 120  # until an object that nobody removed has lost its consumer: longer than a fetch of a sample waits


class Store(Section):
    """Where states go. Streaming objects and the durable cache have a byte budget each."""

    kind: Literal["local", "mooncake"] = "local"
    path: Path  # local: of the streaming objects, a memory file system is best; mooncake: where the master says its address
    bytes: PositiveInt = 1 << 30
    codec: Literal["raw", "fp8", "fp8_all"] = "raw"  # fp8: e4m3, one scale per token and tap; fp8_all: the last state too
    keep: bool = False  # also put what was fetched into the durable cache
    cache_path: Path | None = None
    cache_bytes: PositiveInt = 8 << 30
    mooncake: Mooncake = Mooncake()

    @model_validator(mode="after")
    def _cache_has_a_place(self):
        if self.keep and self.cache_path is None:
            raise ValueError("store.keep needs store.cache_path")
        return self


class Pool(Section):
    """A rank's view of the extractors."""

    deadline_s: PositiveFloat = 900.0  # of one request
    attempts: PositiveInt = 5
    failures: PositiveInt = 20  # samples in a row that could not be made end the run
    in_flight: PositiveInt = 4
    min_extractors: NonNegativeInt | None = None  # a launch goes on while it has so many; null: all of its own
    look_ahead: PositiveInt = 16  # samples asked for before they are needed


class Init(Section):
    """Warm start, each part by itself; `random` is the other value."""

    layers: Literal["verifier", "random"] = "random"  # the verifier's last layers, where shapes fit
    markov: Literal["bigram", "random"] = "random"  # SVD of the data's bigram PMI
    taps: Literal["scaled", "random"] = "random"  # one scale per tap dimension, folded into the projection on export
    projection: Literal["last_tap", "random"] = "random"  # identity on the last tap


class Gqa(Section):
    """Grouped-query attention as in Qwen3."""

    heads: PositiveInt | None = None
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rope_theta: PositiveFloat | None = None


class Yarn(Section):
    """Rotary frequencies stretched beyond the length that they were made for, at every length alike."""

    factor: Annotated[float, Field(gt=1)]
    original_max_position_embeddings: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: NonNegativeFloat = 1.0  # sharpens the softmax; engines know it as mscale and mscale_all_dim, here equal


class Mla(Section):
    """Multi-head latent attention as in Kimi-K3: rotary pairs are interleaved. Nothing here is taken from the verifier."""

    heads: PositiveInt
    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    rope_theta: PositiveFloat = 10000.0
    yarn: Yarn | None = None


class Draft(Section):
    """The draft. Taps are aux ids: tap `a` is the residual stream after `a` verifier layers."""

    taps: tuple[PositiveInt, ...]
    decoder: Literal["gqa", "mla"] = "gqa"
    gqa: Gqa = Gqa()
    mla: Mla | None = None
    layers: PositiveInt = 5
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None  # null: all sliding where there is a window
    window: PositiveInt | None = None  # sliding layers see so many tokens, by the engine's rule
    causal: bool | None = None  # inside a block; null: as engines choose, sliding layers causal and full ones not
    block_size: Annotated[int, Field(gt=1)] = 8
    mask_token_id: NonNegativeInt
    markov_rank: PositiveInt = 256
    hidden_size: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    vocab_size: PositiveInt | None = None  # rows of the verifier's embedding
    draft_vocab_size: PositiveInt | None = None  # tokens that the draft can say, those most often supervised; null: all
    rms_norm_eps: PositiveFloat | None = None
    max_position_embeddings: PositiveInt | None = None
    init: Init = Init()

    @field_validator("taps")
    @classmethod
    def _ascending(cls, taps):
        if not taps or list(taps) != sorted(set(taps)):
            raise ValueError(f"taps must be ascending and distinct (engines concatenate in layer order), e.g. {sorted(set(taps))}")
        return taps

    @model_validator(mode="after")
    def _parts_agree(self):
        types = self.types_of_layers()
        if len(types) != self.layers:
            raise ValueError(f"draft.layer_types has {len(types)} entries for draft.layers = {self.layers}")
        if ("sliding_attention" in types) != (self.window is not None):
            raise ValueError("draft.window and sliding layers in draft.layer_types need one another")
        if (self.decoder == "mla") != (self.mla is not None):
            raise ValueError(f"draft.decoder = {self.decoder}: draft.mla is {'missing' if self.mla is None else 'for draft.decoder = mla'}")
        if self.decoder == "mla" and (self.window or self.causal or self.draft_vocab_size):
            raise ValueError("draft.decoder = mla: engines serve such drafts without window, not causal and with the whole vocabulary")
        return self

    def types_of_layers(self) -> tuple[str, ...]:
        """`layer_types` with its default filled in."""
        return self.layer_types or ("sliding_attention" if self.window else "full_attention",) * self.layers


class Loss(Section):
    """The objective: weighted terms of each slot, all weighted by exp(-slot / decay_gamma)."""

    terms: Annotated[dict[Literal["ce", "ce_argmax", "l1", "tv"], PositiveFloat], Field(min_length=1)] = {"ce": 0.1, "l1": 0.9}
    confidence: NonNegativeFloat = 1.0
    decay_gamma: PositiveFloat = 4.0
    denominator: Literal["weighted", "slots"] = "weighted"
    chunk_bytes: PositiveInt = 256 << 20  # of logits held at once


class Muon(Section):
    lr: PositiveFloat | None = None  # null: train.lr
    scale: Literal["match_rms_adamw", "spectral"] = "match_rms_adamw"
    momentum: Fraction = 0.95
    weight_decay: NonNegativeFloat = 0.1


class Train(Section):
    """The training loop. A step is `global_batch` samples of the global order, however many ranks share them."""

    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    global_batch: PositiveInt = 8
    micro_tokens: PositiveInt = 8192  # packed tokens of one micro-step
    num_anchors: PositiveInt = 512  # of one sample
    anchors: Literal["uniform", "walk"] = "uniform"  # walk: as often as an engine drafts there (`train.visited`); costs a forward pass more
    grow_slots: Fraction = 0.0  # blocks of 2, then 4, then all slots over this share of the run
    optimizer: Literal["muon", "adamw"] = "muon"
    lr: PositiveFloat = 1e-4
    min_lr: NonNegativeFloat = 0.0
    warmup_ratio: Fraction = 0.03
    weight_decay: NonNegativeFloat = 0.01  # of what AdamW updates
    markov_lr_scale: PositiveFloat = 1.0
    muon: Muon = Muon()
    clip: PositiveFloat = 1.0
    parallel: Literal["ddp", "fsdp"] = "ddp"  # ranks hold whole parameters, or rows of each (FSDP2)
    threads: PositiveInt = 1  # CPU threads of one rank
    stuck_s: PositiveFloat = 3600.0  # a rank that waits so long for another one ends; longer than any wait for states
    checkpoint_every: PositiveFloat = 500  # steps; under 1: of an epoch
    keep_checkpoints: PositiveInt = 3  # the newest; the best one stays too
    milestones: tuple[Fraction, ...] = ()  # shares of the run whose checkpoints stay too
    validate_every: PositiveInt | None = None  # steps between simulations on held-out data (`data.validation`)
    validation_samples: PositiveInt = 64
    log_every: PositiveInt = 20  # steps


class Evaluate(Section):
    """Acceptance (`train.evaluate`, and validation while training)."""

    sets: tuple[str, ...] = ()  # files of prompts or rollouts, or public sets by name (`train.sets`)
    limit: PositiveInt | None = None  # conversations of each set
    # simulation alone: states from the store
    readings: Annotated[tuple[Literal["closed_loop", "simulation"], ...], Field(min_length=1)] = ("closed_loop", "simulation")
    engine: str | None = None  # URL of a served engine whose counters are read too
    concurrency: PositiveInt = 1  # requests that it has at once
    rule: Literal["greedy", "standard", "greedy_drafts", "block"] = "greedy"  # of acceptance (`train.acceptance`)
    temperature: PositiveFloat = 1.0  # of every rule but greedy
    max_tokens: PositiveInt = 128
    batch_size: PositiveInt = 32  # decoded together
    threads: PositiveInt = 1


class Restarts(Section):
    """How often a role that dies is started again before its death ends the launch."""

    master: NonNegativeInt = 0
    extractor: NonNegativeInt = 0  # each
    trainer: NonNegativeInt = 0  # all ranks together, from the latest checkpoint


class Launch(Section):
    """Roles that `slurm.launch` starts, on this machine or over the nodes of a Slurm allocation."""

    extractors: NonNegativeInt = 1  # of extract.nodes nodes each; 0: jobs of their own (`slurm.submit --extractors`)
    trainer_nodes: NonNegativeInt = 0  # 0: everything on one machine
    trainers: PositiveInt = 1  # ranks, on each trainer node
    gpus: NonNegativeInt = 0  # of each node; on one machine extractors take the first, trainers the next
    interface: str | None = None  # of the fabric, e.g. ib0; null: the one by which nodes reach one another
    slurm: dict[str, str | int | bool] = {}  # options of sbatch for `slurm.submit`, e.g. {partition: gpu, account: me}
    minutes: PositiveInt = 24 * 60  # that it asks for
    checkpoint_s: NonNegativeFloat = 300.0  # for the trainers to write one, when SIGUSR1 says that time is running out
    restarts: Restarts = Restarts()
    ready_s: PositiveFloat = 1800.0  # an extractor answers by then
    stuck_s: PositiveFloat = 60.0  # a service that answers nothing for so long counts as dead
    grace_s: NonNegativeFloat = 10.0  # between SIGTERM and SIGKILL


class Python(Section):
    """Interpreters, where extraction and training live in environments of their own; null: the one that runs `slurm.launch`."""

    extract: Path | None = None
    train: Path | None = None


class Plan(Section):
    """What `slurm.plan` cannot find out by itself where it runs."""

    layers: PositiveInt | None = None  # of the verifier, as heads and weights; null: by its files
    heads: PositiveInt | None = None
    weights: PositiveInt | None = None
    gpu_bytes: PositiveInt | None = None  # memory of one GPU; null: not checked
    rows: PositiveInt | None = None  # of the data set, and mean tokens of one; null: by the data set
    tokens: PositiveInt | None = None
    prefill: PositiveFloat | None = None  # tokens/s of one extractor; null: by the run's metrics
    training: PositiveFloat | None = None  # tokens/s of one rank that never waits; null: by the run's metrics


class Rounds(Section):
    """Rollout and training by turns, on the same machines or devices (`slurm.rounds`)."""

    batches: PositiveInt  # steps of one round
    prompts: tuple[Path, ...]  # as for `extract.rollout`, in the order of rounds; begun anew when all were used
    number: NonNegativeInt = 0  # the round that runs now: set by slurm.rounds


class Config(Section):
    run_dir: Path
    seed: NonNegativeInt = 0
    verifier: Verifier
    data: Data
    rollout: Rollout = Rollout()
    extract: Extract = Extract()
    store: Store
    pool: Pool = Pool()
    draft: Draft
    loss: Loss = Loss()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    launch: Launch = Launch()
    rounds: Rounds | None = None
    python: Python = Python()
    plan: Plan = Plan()

    @property
    def finished(self) -> Path:
        """The trainers write this file when they are done: what proves it."""
        return self.run_dir / "finished.json"

    @model_validator(mode="after")
    def _sections_agree(self):
        if self.extract.max_model_len <= self.data.length:
            raise ValueError(
                f"extract.max_model_len: {self.extract.max_model_len} must exceed data.length ({self.data.length}) by one token at least"
            )
        if self.rollout.states and not (self.extract.engine == "vllm" and self.store.cache_path):
            raise ValueError("rollout.states needs extract.engine: vllm and store.cache_path")
        if self.rounds and not (self.store.keep and self.train.max_steps):
            raise ValueError("rounds needs store.keep and train.max_steps (of all rounds together)")
        return self
