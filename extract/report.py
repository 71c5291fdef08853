"""What a person looks at before trusting a data set: counts, shares, a histogram of lengths, and rows in colour."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from configs.schema import Data
from extract.merge import Summary

CAUSES = {
    "assistant_first": "the conversation begins with an answer",
    "bad_ids": "token ids that are no list of the verifier's ids",
    "bad_json": "not JSON",
    "bad_tools": "tools or a tool call that cannot be read",
    "bad_utf8": "not UTF-8, or a lone surrogate",
    "duplicate": "the same tokens as an earlier row",
    "empty_turn": "a turn without text, reasoning or tool call",
    "failed": "a fault of this program",
    "few_supervised": "fewer supervised tokens than data.min_supervised",
    "no_answer": "no turn of the assistant",
    "no_conversation": "no field that holds a conversation",
    "not_a_message": "a turn that is no object",
    "not_a_row": "a row that is no object",
    "not_taken": "left out by the source's weight",
    "not_text": "images or other content that is no text",
    "row_too_large": "a line beyond what is read",
    "stop_in_text": "an answer that contains an end-of-turn token as text",
    "template_rejects": "the chat template raises an error",
    "too_long": "no answer ends within data.length",
    "unfinished": "a rollout that ended neither by itself nor at its limit",
    "unknown_role": "a role that is none of system, user, assistant, tool",
    "unproven": "supervised tokens that cannot be told for sure",
}


def write_report(summary: Summary, data: Data, folder: Path) -> str:
    """report.json, report.md and lengths.png in `folder`; the one line that says it all."""
    kept, tokens, supervised = len(summary.tokens), int(summary.tokens.sum()), int(summary.supervised.sum())
    rollouts = sum(summary.finished.values())
    record = {
        "rows": summary.rows,
        "kept": kept,
        "training": summary.training,
        "validation": summary.validation,
        "tokens": tokens,
        "supervised": supervised,
        "supervised_share": supervised / max(1, tokens),
        "length": _quantiles(summary.tokens),
        "cut_to_length": summary.cut,
        "rollouts": rollouts,
        "rollouts_at_token_limit": summary.finished["length"],
        "drops": dict(summary.drops.most_common()),
        "sources": {name: dict(counts) for name, counts in summary.sources.items()},
    }
    (folder / "report.json").write_text(json.dumps(record, indent=2) + "\n")
    (folder / "report.md").write_text(_markdown(record, data))
    if kept:
        _histogram(summary, data.length, folder / "lengths.png")
    line = f"{kept:,} of {summary.rows:,} rows kept ({summary.validation:,} held out), {tokens:,} tokens, {supervised:,} supervised"
    if rollouts:
        line += f"; {summary.finished['length'] / rollouts:.0%} of {rollouts:,} rollouts were cut at the token limit"
    return line + "".join(f"; {count:,} {cause}" for cause, count in summary.drops.most_common())


def _markdown(record: dict, data: Data) -> str:
    lines = [
        "# Data set",
        "",
        f"{record['kept']:,} of {record['rows']:,} rows kept: {record['training']:,} for training, {record['validation']:,} held out.",
        f"{record['tokens']:,} tokens, {record['supervised']:,} of them supervised ({record['supervised_share']:.1%}).",
        f"{record['cut_to_length']:,} rows were cut to {data.length:,} tokens (at a {data.cut}).",
        f"{record['rollouts']:,} rollouts, {record['rollouts_at_token_limit']:,} of them cut at the token limit.",
        "",
        "| tokens a row | " + " | ".join(record["length"]) + " |",
        "|---|" + "---|" * len(record["length"]),
        "| |" + "".join(f" {value:,} |" for value in record["length"].values()),
        "",
        "![lengths](lengths.png)",
        "",
        "| source | rows | kept | tokens | supervised |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | " + " | ".join(f"{counts.get(key, 0):,}" for key in ("rows", "kept", "tokens", "supervised")) + " |"
            for name, counts in record["sources"].items()
        ),
        "",
        "| dropped | rows | why |",
        "|---|---|---|",
        *(f"| {cause} | {count:,} | {CAUSES[cause]} |" for cause, count in record["drops"].items()),
    ]
    return "\n".join(lines) + "\n"


def _quantiles(tokens: np.ndarray) -> dict[str, int]:
    names = {"shortest": 0, "median": 50, "90 %": 90, "99 %": 99, "longest": 100}
    return {name: int(np.percentile(tokens, share)) for name, share in names.items()} if len(tokens) else {}


def _histogram(summary: Summary, length: int, file: Path) -> None:
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    edges = np.linspace(0, min(length, int(summary.tokens.max())) + 1, 51)
    axes.hist(summary.tokens, edges, label="tokens")
    axes.hist(summary.supervised, edges, label="supervised", alpha=0.6)
    axes.set(xlabel="tokens a row", ylabel="rows")
    axes.legend(loc="upper right")
    figure.savefig(file, dpi=120)


def show(console: Console, title: str, pieces: list[str], mask: np.ndarray) -> None:
    """Print one row: supervised tokens in green, each a shade of its own so that borders are seen, the rest dim."""
    text = Text()
    for number, (piece, supervised) in enumerate(zip(pieces, mask, strict=True)):
        text.append(piece, ("bold green", "bold bright_green")[number % 2] if supervised else "dim")
    console.print(Text(f"{title}: {len(mask)} tokens, {int(mask.sum())} supervised", "bold"), text, "", sep="\n")
