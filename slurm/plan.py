"""What a run takes, and every reason why it cannot work: `python -m slurm.plan CONFIG [key=value…]`.

Topology, bytes, memory, rates and hours by arithmetic: from the recipe, the verifier's files, the data set, and what the run has
measured if it has trained before. Nothing is started or allocated. Exit status 2 where the run cannot work; `slurm.launch` runs
this first.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator

from configs.load import parse
from slurm.sizes import Facts, parts_of, size_of
from store.verifier import VerifierError

UTILISATION = 0.9  # of a GPU's memory, unless vLLM is told otherwise
SURE = 1.1  # supply over demand that is worth no warning


def report(facts: Facts) -> Iterator[str]:
    """The plan, line by line."""
    config, spec = facts.config, facts.spec
    launch, extract = config.launch, config.extract
    yield (
        f"nodes           {facts.nodes}: {launch.extractors} extractor(s) of {extract.nodes}, tensor parallel {extract.tensor_parallel}; "
        f"{launch.trainer_nodes} of trainers, {facts.ranks} rank(s)"
    )
    total = sum(facts.parameters.values())
    yield f"draft           {total:,} parameters, block {spec.block_size}, taps {list(spec.taps)}"
    yield f"states          {size_of(facts.token)} a token, {size_of(facts.stored_token)} in the store ({config.store.codec})"
    yield f"sample          {size_of(facts.sample)} at most; a step of {config.train.global_batch}: {size_of(facts.step)}"
    yield f"store           {size_of(facts.peak)} at most, of {size_of(config.store.bytes)}: {facts.in_flight} sample(s) of each rank"
    if extract.engine == "vllm":
        yield f"extractor GPU   {parts_of(facts.extractor_memory)}"
    yield f"trainer rank    {parts_of(facts.trainer_memory)}"
    yield f"  on the host   {size_of((config.pool.look_ahead + 1) * config.data.length * facts.token)} of states that wait to be used"
    supply, demand = facts.rates
    for what, rate, key in (("extractors", supply, "prefill"), ("trainers", demand, "training")):
        yield f"{what:<16}" + (f"{rate:,.0f} tok/s together" if rate else f"not known: plan.{key}, or a run's metrics.jsonl")
    if facts.dataset is None:
        yield f"data            none in {config.data.path} yet (plan.rows and plan.tokens stand for it)"
        return
    rows, mean = facts.dataset
    steps = config.train.epochs * math.ceil(rows / config.train.global_batch)
    steps = min(steps, config.train.max_steps or steps)
    yield f"data            {rows:,} rows of {mean:,.0f} tokens: {steps:,} steps"
    if supply and demand:
        rate, limit = min((supply, "extractors"), (demand, "trainers"))
        per_second = rate / (config.train.global_batch * mean)
        hours = steps / per_second / 3600
        gpus = facts.nodes * launch.gpus
        yield f"time            {per_second:.3g} steps/s, limited by the {limit}: {hours:,.1f} hours, {hours * gpus:,.0f} GPU-hours"


def refusals(facts: Facts) -> list[str]:
    """Why the run cannot work: "key: reason", the key being the one to change."""
    return [f"{key}: {reason}" for key, wrong, reason in (*_of_extractors(facts), *_of_store(facts), *_of_training(facts)) if wrong]


def _of_extractors(facts: Facts) -> list[tuple]:
    config, verifier = facts.config, facts.verifier
    extract, launch = config.extract, config.launch
    vllm, tensor_parallel = extract.engine == "vllm", extract.tensor_parallel
    on_node = tensor_parallel // extract.nodes
    flags = {name.replace("_", "-"): value for name, value in extract.flags.items()}
    usable = (config.plan.gpu_bytes or math.inf) * float(flags.get("gpu-memory-utilization", UTILISATION))
    heads, parts = verifier.get("num_attention_heads", 0), facts.extractor_memory
    needed = launch.extractors * tensor_parallel + launch.trainers if not launch.trainer_nodes else max(on_node, launch.trainers)
    supply, waits = facts.rates[0], facts.ranks * facts.in_flight * config.data.length
    seconds = waits / supply if supply else 0
    too_long = extract.batch_tokens < extract.max_model_len
    return [
        ("extract.batch_tokens", vllm and too_long, f"{extract.batch_tokens:,}: a prompt of {extract.max_model_len:,} is prefilled whole"),
        ("extract.flags.enable-chunked-prefill", flags.get("enable-chunked-prefill"), "chunked prefill changes states"),
        ("extract.flags.enable-prefix-caching", flags.get("enable-prefix-caching"), "a cached prefix has no states"),
        ("extract.tensor_parallel", vllm and heads % tensor_parallel, f"{tensor_parallel} does not divide the verifier's {heads} heads"),
        ("extract.nodes", tensor_parallel % extract.nodes, f"{extract.nodes} does not divide extract.tensor_parallel, {tensor_parallel}"),
        ("extract.nodes", not vllm and extract.nodes > 1, f"{extract.nodes}: the transformers engine runs on one"),
        ("extract.batch_size", vllm and sum(parts.values()) > usable, f"{parts_of(parts)}; each GPU has {size_of(usable)} for them"),
        ("launch.trainer_nodes", extract.nodes > 1 and not launch.trainer_nodes, f"0 is one machine, extract.nodes is {extract.nodes}"),
        ("launch.gpus", 0 < launch.gpus < needed, f"{launch.gpus} on each node, but {needed} are needed on one"),
        ("pool.deadline_s", seconds > config.pool.deadline_s, f"{config.pool.deadline_s:g}, all that is asked for takes {seconds:,.0f} s"),
        *((f"python.{side}", path and not shutil.which(path), f"{path} is no interpreter") for side, path in config.python),
    ]


def _of_store(facts: Facts) -> list[tuple]:
    store, mooncake = facts.config.store, facts.config.store.mooncake
    remote, step, deadline = store.kind == "mooncake", size_of(facts.step), mooncake.deadline_s
    alone = store.path.resolve().is_relative_to("/dev/shm") and facts.nodes > 1
    return [
        ("store.bytes", store.bytes < facts.step, f"{size_of(store.bytes)} cannot hold the samples of one step, {step}"),
        ("store.path", alone, f"{store.path} is memory of one node, and roles are on {facts.nodes}: name a folder that all of them see"),
        ("store.mooncake.release_s", remote and mooncake.release_s <= deadline, f"{mooncake.release_s}: a put takes up to {deadline}"),
        ("store.mooncake.lease_s", remote and mooncake.lease_s <= deadline, f"{mooncake.lease_s}: a read takes up to {deadline}"),
        ("store.mooncake.orphan_s", remote and mooncake.orphan_s <= deadline, f"{mooncake.orphan_s}: a read may begin deadline_s late"),
    ]


def _of_training(facts: Facts) -> list[tuple]:
    config, spec, verifier = facts.config, facts.spec, facts.verifier
    data, batch, gpu = config.data, config.train.global_batch, config.plan.gpu_bytes or math.inf
    vocabulary, hidden = verifier.get("vocab_size", spec.vocab_size), verifier.get("hidden_size", spec.hidden_size)
    layers, taps = verifier.get("num_hidden_layers", math.inf), spec.taps
    positions = min(spec.max_position_embeddings, verifier.get("max_position_embeddings", math.inf))
    contract = data.path / "data_contract.json"
    prepared = json.loads(contract.read_text())["length"] if contract.exists() else data.length
    heads, kv_heads = (spec.gqa.heads, spec.gqa.kv_heads) if spec.gqa else (1, 1)
    parts = facts.trainer_memory
    return [
        ("draft.taps", taps[-1] >= layers, f"{taps[-1]}: the verifier has {layers} layers, and its last state comes along by itself"),
        ("draft.mask_token_id", spec.mask_token_id >= spec.vocab_size, f"{spec.mask_token_id} is no token of {spec.vocab_size:,}"),
        ("draft.vocab_size", spec.vocab_size < vocabulary, f"{spec.vocab_size:,}, but the verifier has {vocabulary:,} tokens"),
        ("draft.hidden_size", spec.hidden_size != hidden, f"{spec.hidden_size:,}, but the verifier's is {hidden:,}"),
        ("draft.gqa.kv_heads", heads % kv_heads, f"{kv_heads} does not divide draft.gqa.heads, {heads}"),
        ("data.length", data.length > positions, f"{data.length:,}: positions end at {positions:,}"),
        ("data.length", prepared != data.length, f"{data.length:,}, but {data.path} was prepared with {prepared:,}"),
        ("train.global_batch", batch < facts.ranks, f"{batch} samples for {facts.ranks} ranks: some would never have any"),
        ("train.micro_tokens", sum(parts.values()) > gpu, f"{parts_of(parts)}; a GPU has {size_of(gpu)}"),
    ]


def warnings(facts: Facts) -> list[str]:
    """What works, but not well."""
    config, (supply, demand) = facts.config, facts.rates
    share, ahead, micro = facts.in_flight, facts.ranks * config.pool.look_ahead * facts.sample, config.train.micro_tokens
    rates = f"{supply or 0:,.0f} tok/s are made, {demand or 0:,.0f} trained on"
    slow, fast = (supply and demand and pair[0] * SURE < pair[1] for pair in ((supply, demand), (demand, supply)))
    table = [
        ("store.bytes", config.store.bytes < ahead, f"{size_of(config.store.bytes)}: all ranks look ahead for {size_of(ahead)}"),
        ("pool.in_flight", share < config.pool.in_flight, f"{config.pool.in_flight}, but a rank's share of the store holds {share}"),
        ("verifier.path", "vocab_size" not in facts.verifier, f"{config.verifier.path} cannot be read here, so sizes were not compared"),
        ("train.micro_tokens", micro < config.data.length, f"{micro:,}: a sample of data.length tokens gets a micro-step of its own"),
        ("launch.extractors", slow, f"{rates}: trainers will wait"),
        ("launch.trainers", fast, f"{rates}: extractors will idle"),
    ]
    return [f"{key}: {reason}" for key, there, reason in table if there]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slurm.plan", description=__doc__.splitlines()[0])
    args, config = parse(parser, argv)
    try:
        facts = Facts(config)
    except VerifierError as error:
        print(f"slurm.plan: verifier.path: {error}", file=sys.stderr)
        return 2
    for line in report(facts):
        print(line)
    for warning in warnings(facts):
        print(f"warning: {warning}")
    sys.stdout.flush()
    for refusal in (found := refusals(facts)):
        print(f"slurm.plan: {args.config}: {refusal}", file=sys.stderr)
    return 2 if found else 0


if __name__ == "__main__":
    sys.exit(main())
