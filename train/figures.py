"""Figures of a report, legible at the width of a README's column; intervals are drawn where there are any."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

OURS, OTHER, GREY = "tab:blue", "tab:orange", "0.6"


def draw_figures(folder: Path, report: dict) -> list[str]:
    """Draw what the report has data for; returns the files' names."""
    main = report["readings"][report["main"]]
    figures = {
        "positions.png": (_positions, (main, report.get("reference_positions"))),
        "histogram.png": (_histogram, main["histogram"]),
        "sets.png": (_sets, (main, report.get("pairs"))),
        "context.png": (_context, main["context"]),
        "calibration.png": (_calibration, report["calibration"]),
        "training.png": (_training, (_lines(folder / "metrics.jsonl"), _lines(folder / "validation.jsonl"))),
    }
    drawn = []
    for name, (draw, data) in figures.items():
        if data and (name != "training.png" or data[0]):
            figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
            draw(axes, data)
            if axes.get_legend_handles_labels()[1]:
                figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
            figure.savefig(folder / name, dpi=120)
            plt.close(figure)
            drawn.append(name)
    return drawn


def _values(entries: list[dict]) -> np.ndarray:
    return np.array([entry["value"] for entry in entries], float)


def _errors(entries: list[dict]) -> np.ndarray:
    """[2, N] distances of the intervals' ends from the values, NaN where there is no interval."""
    low, high = np.array([entry["interval"] or (np.nan, np.nan) for entry in entries]).T
    return np.maximum([_values(entries) - low, high - _values(entries)], 0)


def _bars(axes, at, entries: list[dict], width: float, color: str, label: str | None = None) -> None:
    axes.bar(
        at, _values(entries), width, color=color, label=label, yerr=_errors(entries), capsize=2, ecolor="0.2", error_kw={"linewidth": 1}
    )


def _positions(axes, data) -> None:
    main, reference = data
    slots = np.arange(1, len(main["unconditional"]) + 1)
    _bars(axes, slots, main["unconditional"], 0.6, OURS, "of all forwards")
    given = main["conditional"]
    style = {"color": "tab:green", "marker": "o", "markersize": 4, "capsize": 2, "linewidth": 1}
    axes.errorbar(slots, _values(given), _errors(given), **style, label="of those that accepted the one before")
    if reference:
        axes.plot(slots, _values(reference), "D", color=OTHER, markersize=5, label="reference, of all forwards")
    axes.set(xlabel="position in the block", ylabel="share accepted", ylim=(0, 1.02), xticks=slots, title="Acceptance by position")


def _histogram(axes, counts: list[float]) -> None:
    shares = np.array(counts) / sum(counts)
    bars = axes.bar(range(len(counts)), shares, color=OURS)
    axes.bar_label(bars, [f"{share:.0%}" if share >= 0.005 else "" for share in shares], fontsize=8)
    axes.set(xlabel="drafts accepted by a forward", ylabel="share of forwards", xticks=range(len(counts)), title="Accepted lengths")
    axes.margins(y=0.12)


def _sets(axes, data) -> None:
    main, pairs = data
    names = list(pairs["sets"] if pairs else main["sets"])
    at = np.arange(len(names))
    if pairs:
        _bars(axes, at - 0.2, [pairs["sets"][name]["ours"] for name in names], 0.38, OURS, "this draft")
        _bars(axes, at + 0.2, [pairs["sets"][name]["reference"] for name in names], 0.38, OTHER, "reference, same answers")
    else:
        _bars(axes, at, [main["sets"][name] for name in names], 0.6, OURS)
    axes.set_xticks(at, names, rotation=30 if len(names) > 4 else 0, ha="right" if len(names) > 4 else "center", fontsize=8)
    axes.set(ylabel="tokens per forward", title="By set, with 95 % intervals")
    axes.axhline(1, color=GREY, linestyle=":", linewidth=1, label="without a draft")


def _context(axes, parts: dict) -> None:
    at = np.arange(len(parts))
    _bars(axes, at, list(parts.values()), 0.6, OURS)
    axes.set_xticks(at, [f"{start}–{2 * int(start) - 1}\n{entry['forwards']:,.0f} forwards" for start, entry in parts.items()], fontsize=8)
    axes.set(xlabel="tokens before the draft", ylabel="tokens per forward", title="By context length, with 95 % intervals")
    axes.axhline(1, color=GREY, linestyle=":", linewidth=1, label="without a draft")


def _calibration(axes, entry: dict) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1)
    for name, color, label in (("before", OTHER, "as trained"), ("after", OURS, "scaled")):
        weight, predicted, happened = np.array([row for row in entry["reliability"][name] if row[0] >= 1]).T  # a forward at least
        middle, half = (happened + 2 / weight) / (1 + 4 / weight), 2 * np.sqrt(happened * (1 - happened) / weight + 1 / weight**2)
        ends = np.abs([happened - middle + half / (1 + 4 / weight), middle + half / (1 + 4 / weight) - happened])  # Wilson
        style = {"color": color, "marker": "o", "markersize": 4, "capsize": 2, "linewidth": 1, "alpha": 0.9}
        axes.errorbar(predicted, happened, ends, **style, label=f"{label}: ECE {entry['ece'][name]:.1%}")
    axes.set(xlabel="predicted survival of the block's prefix", ylabel="share that survived", title="Confidence")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))


def _lines(path: Path) -> dict[int, dict]:
    """Records by step; of two of one step (a resumed run) the later one holds."""
    if not path.exists():
        return {}
    return dict(sorted((record["step"], record) for record in map(json.loads, path.read_text().splitlines())))


def _training(axes, data) -> None:
    steps, validation = data
    axes.plot(list(steps), [record["loss"] for record in steps.values()], color=OURS, linewidth=1)
    axes.set(xlabel="optimizer step", ylabel="loss per weighted slot", title="Training")
    right = axes.twinx()
    curve, name = (validation, "tokens_per_forward") if validation else (steps, "block_length")
    right.plot(list(curve), [record[name] for record in curve.values()], color=OTHER, linewidth=1, marker="o" if validation else None)
    right.set_ylabel("tokens per forward, held out" if validation else "tokens per block (uniform anchors)")
    right.yaxis.label.set_color(OTHER)
    axes.yaxis.label.set_color(OURS)
