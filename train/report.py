"""The report of an evaluation: report.md, report.json and figures in the run's folder. `tables` go into model cards too."""

from __future__ import annotations

import json
from pathlib import Path

from train.figures import draw_figures

READINGS = {
    "closed_loop": "closed loop (draft and verifier decode together)",
    "simulation": "simulation along the same answers, exact expectation",
    "engine": "served engine, its own counters differenced",
    "bigrams": "bigram table of the training data (baseline)",
}


def write_report(run_dir: Path, report: dict) -> str:
    """Write the report and return its Markdown."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "report.json").write_text(json.dumps(report, indent=1))
    figures = draw_figures(run_dir, report)
    text = "\n".join(
        [f"# Acceptance of {Path(report['draft']).name}", "", *tables(report), *(f"![{Path(f).stem}]({f})" for f in figures), ""]
    )
    (run_dir / "report.md").write_text(text)
    return text


def tables(report: dict) -> list[str]:
    """The report's Markdown lines without title and figures."""
    main, pairs = report["readings"][report["main"]], report.get("pairs")
    return [
        "Tokens per verifier forward after the prefill: 1.0 without any accepted draft, bonus token included, the last block cut at the "
        f"end of text, at most {report['block_size'] + 1}. In brackets: 95 % bootstrap intervals over conversations.",
        "",
        *(f"**Warning**: {warning}" for warning in report["warnings"]),
        *([""] if report["warnings"] else []),
        *_table(["reading", "tokens per forward", "mean over sets"], [_reading(name, entry) for name, entry in report["readings"].items()]),
        *_sets(main, pairs),
        *_positions(main),
        *_parts("turn", main["turns"], str),
        *_parts("context length", main["context"], lambda start: f"{start} to {2 * int(start) - 1}"),
        *_agreement(report),
        *_calibration(report["calibration"]),
        *_diagnosis(report.get("diagnosis")),
        *_table(["protocol", ""], [(name, f"`{value}`") for name, value in report["protocol"].items()]),
    ]


def _table(head: list[str], rows: list) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)] + [""]


def _number(entry: dict, digits: int = 3) -> str:
    low_high = entry["interval"]
    if entry["value"] is None:
        return "–"
    return f"{entry['value']:.{digits}f}" + (f" [{low_high[0]:.{digits}f}, {low_high[1]:.{digits}f}]" if low_high else "")


def _reading(name: str, entry: dict) -> tuple:
    return READINGS[name], _number(entry["tokens_per_forward"]), _number(entry["mean_over_sets"])


def _sets(main: dict, pairs: dict | None) -> list[str]:
    if pairs is None:
        rows = [(name, entry["answers"], _number(entry)) for name, entry in main["sets"].items()]
        return _table(["set", "answers", "this draft"], rows)
    rows = [_pair(name, main["sets"][name]["answers"], entry) for name, entry in pairs["sets"].items()]
    rows += [_pair(f"**mean over {len(rows)} sets**", "", pairs["mean_over_sets"]), _pair("**all answers**", "", pairs["all"])]
    return [
        *_table(["set", "answers", "this draft", "reference", "vs reference", "difference"], rows),
        f"Reference: `{Path(pairs['reference']).name}`, in pairs on the same answers, both by simulation. Sets won {pairs['wins']}, lost "
        f"{pairs['losses']}" + (f"; {pairs['unpaired']} answers of one side only are left out." if pairs["unpaired"] else "."),
        "",
    ]


def _pair(name: str, answers, entry: dict) -> tuple:
    values = (_number(entry[side] | {"interval": None}) for side in ("ours", "reference"))
    share = entry["ratio"]["value"]
    return name, answers, *values, "–" if share is None else f"{share:.1%}", _number(entry["difference"])


def _positions(main: dict) -> list[str]:
    columns = zip(main["unconditional"], main["conditional"])
    rows = [(k, _number(share), _number(given)) for k, (share, given) in enumerate(columns, 1)]
    return [
        *_table(["position", "accepted, of all forwards", "of those that accepted the one before"], rows),
        f"{main['forwards']:,.0f} forwards; accepted a forward before the cut: {main['accepted_per_forward']:.3f}. Forwards that accepted "
        f"0 to {len(rows)} drafts: {', '.join(f'{count:,.0f}' for count in main['histogram'])}.",
        "",
    ]


def _parts(what: str, parts: dict, label) -> list[str]:
    rows = [(label(at), f"{entry['forwards']:,.0f}", _number(entry)) for at, entry in parts.items()]
    return _table([what, "forwards", "tokens per forward"], rows) if len(rows) > 1 else []


def _agreement(report: dict) -> list[str]:
    lines = []
    if "identical" in report:
        lines.append(
            f"- output with and without the draft: {report['identical']} answers identical, {report['near_ties']} differ first at a near "
            f"tie (top-2 gap under {report['rounding']:g}), {report['wrong']} otherwise"
        )
    if entry := report.get("agreement"):
        verdict = "agree" if entry["agree"] else "DISAGREE"
        if entry["identical"] is None:
            said = f"{entry['excess_forwards']:+.1f} forwards in the loop, standard error {entry['standard_error']:.1f}"
        else:
            said = f"{entry['identical']} of {entry['answers']} answers take the very same forwards"
        lines.append(f"- closed loop and simulation {verdict}: {said}")
    if entry := report.get("engine_agreement"):
        verdict, (engine, ours) = "agrees" if entry["agree"] else "DISAGREES", entry["forwards"]
        said = f"{engine:,.0f} forwards, {ours:,.0f} here, on {entry['answers']} answers"
        if values := entry.get("tokens_per_forward"):
            said += f"; {values[0]:.3f} tokens per forward, {values[1]:.3f} here, standard error {entry['standard_error']:.3f}"
        lines.append(f"- the served engine {verdict}: {said}")
    return [*lines, ""] if lines else []


def _calibration(entry: dict) -> list[str]:
    if not entry:
        return []
    columns = (("threshold", "g"), ("drafts_per_forward", ".2f"), ("tokens_per_forward", ".3f"))
    rows = [[format(row[name], digits) for name, digits in columns] for row in entry["thresholds"]]
    return [
        f"Confidence: expected calibration error of a block's predicted survival {entry['ece']['before']:.1%}, after sequential "
        f"temperature scaling {entry['ece']['after']:.1%} (fitted on other answers). Temperatures by slot: "
        f"{', '.join(f'{value:.2f}' for value in entry['temperatures'])}. Cutting blocks where they survive with less than a threshold:",
        "",
        *_table(["threshold", "drafts verified a forward", "tokens per forward"], rows),
    ]


def _diagnosis(entry: dict | None) -> list[str]:
    if entry is None:
        return []
    verdict = f"Likely: {', '.join(entry['faults'])}." if entry["faults"] else "No fault found."
    limits = f" What limits this draft: {', '.join(entry['limits'])}." if entry["limits"] else ""
    rows = [(check["name"], check["verdict"], check["detail"]) for check in entry["checks"]]
    return ["## Diagnosis", "", verdict + limits, "", *_table(["check", "", "what was found"], rows)]
