"""`python -m train.export CHECKPOINT --format {speculators,k3_dspark} --output DIR`: a folder that engines serve.
`python -m train.export [CHECKPOINT] --check DIR`: is what an engine computes from it what was trained?
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from configs.command import command
from configs.schema import Config
from store.verifier import find_file
from train.card import model_card
from train.checkpoint import load_draft, read_record
from train.draft import Draft
from train.evaluate import evaluate
from train.formats import FormatError, config_json, format_of, to_file
from train.published import read_published
from train.served import ServedDraft
from train.verifier import FrozenVerifier

SHARD_BYTES = 4 << 30
SAME = 1e-4  # relative L2 distance of logits from the same weights
ROUNDED = 0.05  # the same where the file's weights were rounded to bf16, so that only gross mistakes show
DRIFT = 0.03  # of accepted drafts: an engine rounds otherwise, and near ties fall the other way


def export(checkpoint: Path, output: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a checkpoint in the format `kind`; `output` appears whole or not at all.

    Raises FormatError (the decoder does not go with the format, the folder is not empty), VerifierError, FileNotFoundError.
    """
    draft, record = load_draft(checkpoint), read_record(checkpoint)
    if format_of(draft.spec) != kind:
        raise FormatError(f"{checkpoint}: its decoder is for the format {format_of(draft.spec)}, not {kind}")
    if output.exists() and any(output.iterdir()):
        raise FormatError(f"{output} is there and not empty")
    verifier = record["config"]["verifier"]["path"]
    frozen = FrozenVerifier.load(verifier, dtype, torch.device("cpu"))
    temporary = output.with_name(f".{output.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_torch_state_dict(to_file(draft, frozen.embedding, frozen.heads.verifier, dtype), temporary, max_shard_size=SHARD_BYTES)
    its_config = json.loads(find_file(verifier, "config.json").read_text())
    config = config_json(draft.spec, verifier, its_config, str(dtype).removeprefix("torch."))
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (temporary / "README.md").write_text(model_card(draft.spec, record, checkpoint))
    shutil.rmtree(output, ignore_errors=True)
    temporary.rename(output)


def check(folder: Path, checkpoint: Path | None = None) -> list[str]:
    """Compare logits and confidences on random states: what our own reading of the folder computes, and the checkpoint where one is
    given, with what an engine computes. Returns a line for each; raises FormatError where they differ, or the names do."""
    served = ServedDraft(folder)
    readings = [("the folder, read back", read_published(folder), SAME)]
    if checkpoint:
        readings.append((f"checkpoint {checkpoint.name}", load_draft(checkpoint), ROUNDED if served.rounded else SAME))
    lines = []
    for name, draft, tolerance in readings:
        worst = max(_distances(draft, served, seed) for seed in range(3))
        lines.append(f"{name}: logits as the engine's within {worst:.1e} (relative L2; {tolerance:.0e} is allowed)")
        if not worst <= tolerance:
            raise FormatError(f"{folder}: {lines[-1]}")
    return lines


@torch.no_grad()
def _distances(draft: Draft, served: ServedDraft, seed: int) -> float:
    """Largest relative distance of logits (of some tokens) and confidences on random states, anchors and tokens."""
    spec, generator = draft.spec, torch.Generator().manual_seed(seed)
    length, anchors = 40, torch.tensor([0, 1, 17, 40])
    taps = torch.randn(length, len(draft.tap_scale), generator=generator) * 3 * draft.tap_scale
    inputs = torch.randn(spec.block_size, spec.hidden_size, generator=generator)
    head = torch.randn(256, spec.hidden_size, generator=generator)
    seen = torch.randint(spec.draft_vocab_size, (256,), generator=generator)
    previous = torch.randint(spec.vocab_size, (len(anchors), spec.block_size), generator=generator)
    markov = draft.markov_head
    context = draft.context(taps[None], torch.arange(length)[None])
    hidden = draft.block(inputs.expand(1, len(anchors), -1, -1), anchors[None], context)[0]
    embedding = markov.markov_w1(previous)
    ours = [hidden @ head.T + embedding @ markov.markov_w2.weight[seen].T, draft.confidence_head(hidden, embedding)]
    theirs = [[], []]
    for anchor, tokens in zip(anchors.tolist(), previous.tolist(), strict=True):
        states = served.hidden(taps[:anchor], inputs)
        theirs[0].append(states @ head.T.double() + torch.stack([served.bias(token)[seen] for token in tokens]))
        theirs[1].append(torch.stack([served.confidence(state, token) for state, token in zip(states, tokens)]))
    pairs = zip(ours, map(torch.stack, theirs))
    return max(float((mine.double() - other).norm() / other.norm().clamp_min(1e-9)) for mine, other in pairs)


def check_engine(url: str, folder: Path, config: Config) -> str:
    """Have the engine at `url`, which serves the draft in `folder` and nobody else meanwhile, answer `evaluate.sets` greedily, and
    compare its counters with the closed loop's. Raises FormatError where they differ by more than rounding; EngineError, ValueError."""
    greedy = {"engine": url, "rule": "greedy", "concurrency": 1, "readings": ("closed_loop",)}
    report = evaluate(config.model_copy(update={"evaluate": config.evaluate.model_copy(update=greedy)}), folder)
    names = "forwards", *(f"at_least/{k}" for k in range(1, report["block_size"] + 1))
    records = report["records"]["engine"], report["records"]["closed_loop"]
    theirs, ours = ([int(sum(record["sums"][name] for record in rows)) for name in names] for rows in records)
    line = f"drafts, and accepted by position: {theirs} in the engine, {ours} in the closed loop ({len(records[1])} prompts)"
    rates = [sum(counts[1:]) / max(1, counts[0]) for counts in (ours, theirs)]
    if theirs[0] == 0 or abs(rates[0] - rates[1]) > DRIFT * rates[0]:
        raise FormatError(f"{url}: {line}")
    return line


@command("train.export", ValueError)
def main() -> None:
    parser = argparse.ArgumentParser(prog="train.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, metavar="CHECKPOINT", help="folder of a checkpoint, RUN/checkpoints/step_…")
    parser.add_argument("--format", choices=("speculators", "k3_dspark"), help="speculators for GQA decoders, k3_dspark for MLA")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights written")
    parser.add_argument("--check", type=Path, metavar="DIR", help="prove an exported folder, and that it is CHECKPOINT's if one is given")
    parser.add_argument("--engine", metavar="URL", help="with CHECKPOINT: compare with an engine that serves DIR, too")
    args = parser.parse_args()
    if args.check is None and not (args.checkpoint and args.format and args.output):
        parser.error("CHECKPOINT, --format and --output are needed to export; or --check DIR")
    if args.engine and not args.checkpoint:
        parser.error("--engine needs CHECKPOINT, whose recipe names the verifier and the prompts")
    if args.check is None:
        export(args.checkpoint, args.output, args.format, getattr(torch, args.dtype))
        print(f"{args.output}: written")
    print("\n".join(check(args.check or args.output, args.checkpoint)))
    if args.engine:
        config = Config.model_validate(read_record(args.checkpoint)["config"])
        print(check_engine(args.engine, args.check or args.output, config))


if __name__ == "__main__":
    sys.exit(main())
