"""The report of an evaluation: report.md, report.json and figures in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def write_report(run_dir: Path, draft: Path, summary: dict) -> str:
    """Write the report and return its Markdown."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "report.json").write_text(json.dumps({"draft": str(draft), **summary}, indent=1))
    figures = {"positions.png": _positions, "histogram.png": _histogram}
    for name, draw in figures.items():
        _figure(run_dir / name, draw, summary)
    curve = _curve(run_dir / "metrics.jsonl")
    if curve:
        _figure(run_dir / "training.png", _training, curve)
    text = _markdown(draft, summary, [*figures, *(["training.png"] if curve else [])])
    (run_dir / "report.md").write_text(text)
    return text


def _markdown(draft: Path, summary: dict, figures: list[str]) -> str:
    block = len(summary["accepted_by_position"])
    rows = [
        ("closed loop (draft and verifier decode together)", summary["tokens_per_forward"]),
        ("offline simulation of the same responses", summary["simulated"]),
        ("bigram table of the training data (baseline)", summary["bigram"]),
    ]
    positions = " ".join(f"{value:.3f}" for value in summary["accepted_by_position"])
    return "\n".join(
        [
            f"# Acceptance of {draft.name}",
            "",
            f"Tokens per verifier forward after the prefill, greedy, bonus included, last block cut; at most {block + 1}.",
            "",
            "| reading | tokens per forward |",
            "|---|---|",
            *(f"| {name} | {value:.3f} |" for name, value in rows),
            "",
            f"- {len(summary['prompts'])} prompts, {summary['forwards']} forwards; drafts accepted before the cut: "
            f"{summary['accepted_before_cut']:.3f} a forward",
            f"- accepted at least up to position 1 to {block}: {positions}",
            f"- output with and without the draft: {summary['identical']} prompts identical, {summary['near_ties']} differ first at a "
            f"near tie (top-2 gap under 1e-3), {summary['wrong']} otherwise",
            f"- the simulation walks exactly as the closed loop on {summary['simulation_agrees']} prompts",
            "",
            *(f"![{Path(name).stem}]({name})" for name in figures),
            "",
        ]
    )


def _figure(path: Path, draw, data) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    draw(axes, data)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _positions(axes, summary: dict) -> None:
    values = summary["accepted_by_position"]
    axes.bar(range(1, len(values) + 1), values, color="tab:blue")
    axes.set(xlabel="position in the block", ylabel="share of forwards that accept it", ylim=(0, 1), title="Acceptance by position")


def _histogram(axes, summary: dict) -> None:
    counts = summary["histogram"]
    axes.bar(range(len(counts)), counts, color="tab:blue")
    axes.set(xlabel="drafts accepted by a forward", ylabel="forwards", title="Accepted lengths")


def _curve(path: Path) -> dict[int, dict]:
    """The run's steps; of two lines of one step (a resumed run) the later one holds."""
    if not path.exists():
        return {}
    return {record["step"]: record for record in map(json.loads, path.read_text().splitlines())}


def _training(axes, curve: dict[int, dict]) -> None:
    steps = sorted(curve)
    axes.plot(steps, [curve[step]["loss"] for step in steps], color="tab:blue", linewidth=1)
    axes.set(xlabel="optimizer step", ylabel="loss per weighted slot", title="Training")
    right = axes.twinx()
    right.plot(steps, [curve[step]["block_length"] for step in steps], color="tab:orange", linewidth=1)
    right.set_ylabel("tokens per block (uniform anchors)")
    right.yaxis.label.set_color("tab:orange")
    axes.yaxis.label.set_color("tab:blue")
