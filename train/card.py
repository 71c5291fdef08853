"""The model card of an exported draft: what it is, how it was trained, what it reaches."""

from __future__ import annotations

import json
from pathlib import Path

from train.contract import DraftContract
from train.report import tables

RECIPE = (
    ("loss", ("terms", "confidence", "decay_gamma", "denominator")),
    ("train", ("optimizer", "lr", "min_lr", "warmup_ratio", "weight_decay", "clip", "global_batch", "num_anchors", "epochs")),
    ("data", ("length",)),
    ("rollout", ("temperature", "max_tokens")),
)


def model_card(spec: DraftContract, record: dict, checkpoint: Path) -> str:
    """README.md with the recipe of a checkpoint's record, and the run's acceptance report where it is about this checkpoint."""
    config = record["config"]
    verifier = config["verifier"]["path"]
    decoder = "multi-head latent attention" if spec.mla else "grouped-query attention"
    sliding = f", {spec.layer_types.count('sliding_attention')} of them sliding over {spec.window} tokens" if spec.window else ""
    facts = [
        ("decoder", f"{spec.layers} layers of {decoder}{sliding}; hidden size {spec.hidden_size}"),
        ("block size", f"{spec.block_size} (slot k predicts the token k + 1 after the anchor)"),
        ("taps", f"{list(spec.taps)} as aux ids, {[tap - 1 for tap in spec.taps]} as outputs of 0-based layers"),
        ("vocabulary", f"{spec.draft_vocab_size:,} of {spec.vocab_size:,}; mask token {spec.mask_token_id}"),
        ("steps", f"{record['step']:,}"),
        *((f"{section}.{key}", config[section][key]) for section, keys in RECIPE for key in keys),
    ]
    lines = ["---", f"base_model: {verifier}", "tags: [speculative-decoding, draft-model, dspark]", "---", ""]
    lines += [f"# A DSpark draft for {verifier}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts), ""]
    return "\n".join(lines + _acceptance(checkpoint) + [f"Trained with dspark-pipeline {record['version']}.", ""])


def _acceptance(checkpoint: Path) -> list[str]:
    report = checkpoint.resolve().parent.parent / "report.json"
    measured = json.loads(report.read_text()) if report.exists() else {}
    if Path(measured.get("draft", "")).resolve().name != checkpoint.resolve().name:
        return ["Acceptance was not measured.", ""]
    return ["## Acceptance", "", *tables(measured)]
