"""Intervals cover what they say, pairs find what is there and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from train import statistics
from train.simulate import expected_walk
from train.statistics import compare, estimate, looped, measured, ratio, resample, summarise, total, walked


def prompts(random, count, gain=1.0, spread=0.25, sets=("a",)) -> list[dict]:
    """Prompts of different lengths, each with a difficulty of its own; about 2 tokens a forward."""
    records = []
    for name in sets:
        for index in range(count):
            tokens = int(random.integers(40, 200))
            rate = 2 * gain * np.exp(spread * random.normal())
            sums = {"tokens": float(tokens), "forwards": tokens / rate}
            records.append({"id": f"{name}-{index}", "set": name, "conversation": f"{name}-{index}", "sums": sums})
    return records


def truth(**kwargs) -> float:
    sums = [record["sums"] for record in prompts(np.random.default_rng(99), 100_000, **kwargs)]
    return sum(entry["tokens"] for entry in sums) / sum(entry["forwards"] for entry in sums)


def interval(records, seed=0) -> list[float]:
    drawn, freedoms = resample(records, seed)
    return measured(ratio(total(drawn)), sum(freedoms.values()))["interval"]


@pytest.mark.parametrize(("count", "sets"), [(25, ("a",)), (4, ("a", "b", "c", "d", "e")), (120, ("a",))])
def test_intervals_cover(monkeypatch, count, sets):
    monkeypatch.setattr(statistics, "RESAMPLES", 600)
    expected, covered, runs = truth(), 0, 300
    for run in range(runs):
        low, high = interval(prompts(np.random.default_rng(run), count, sets=sets), run)
        covered += low <= expected <= high
    # 95 % less what the bootstrap of a skewed ratio is known to lack at 20 prompts
    assert binomtest(covered, runs, 0.93).pvalue > 1e-3 or 0.93 < covered / runs < 0.97


def test_a_standard_error_is_the_spread_of_estimates():
    values, errors = zip(*(estimate(prompts(np.random.default_rng(run), 30)) for run in range(60)))
    assert np.mean(errors) == pytest.approx(np.std(values, ddof=1), rel=0.3)
    assert estimate(prompts(np.random.default_rng(0), 1))[1] == np.inf


def test_pairs_find_two_percent_and_nothing_where_nothing_is(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 600)
    found = {1.0: 0, 1.02: 0}
    for run in range(50):
        random = np.random.default_rng(run)
        reference = prompts(random, 40, sets=("a", "b"))
        for gain in found:
            noise = np.exp(0.03 * random.normal(size=len(reference)))
            ours = [
                record | {"sums": {"tokens": record["sums"]["tokens"], "forwards": record["sums"]["forwards"] / gain / factor}}
                for record, factor in zip(reference, noise)
            ]
            low, high = compare(ours, reference)["all"]["difference"]["interval"]
            found[gain] += not low <= 0 <= high
    assert found[1.02] >= 47 and found[1.0] <= 7


def test_turns_of_a_conversation_are_one_unit():
    one = prompts(np.random.default_rng(0), 10)
    twice = [record | {"id": f"{record['id']}/{turn}"} for record in one for turn in (1, 2)]
    widths = [np.ptp(interval(records)) for records in (one, twice)]
    assert widths[0] == pytest.approx(widths[1])


def test_summary_by_hand():
    sums = [looped([4, 1, 2], [3, 0, 5], 4, prompt=60, turn=1), looped([2, 2], [1, 1], 4, prompt=70, turn=2)]
    records = [{"id": str(i), "set": "ab"[i], "conversation": str(i), "sums": entry} for i, entry in enumerate(sums)]
    summary = summarise(records, 4)
    assert summary["tokens_per_forward"] == {"value": 11 / 5, "interval": None}  # sets of one conversation each
    assert summary["mean_over_sets"]["value"] == pytest.approx((7 / 3 + 2) / 2)
    assert [entry["value"] for entry in summary["unconditional"]] == pytest.approx([0.8, 0.4, 0.4, 0.2])
    assert [entry["value"] for entry in summary["conditional"]] == pytest.approx([0.8, 0.5, 1, 0.5])
    assert summary["histogram"] == pytest.approx([1, 2, 0, 1, 1])
    assert summary["accepted_per_forward"] == pytest.approx(1.8)
    assert {at: entry["forwards"] for at, entry in summary["context"].items()} == {"32": 1, "64": 4}
    assert {at: entry["value"] for at, entry in summary["turns"].items()} == pytest.approx({"1": 7 / 3, "2": 2})


def test_the_walk_of_a_greedy_engine_gives_the_loops_sums():
    survival = (np.arange(4) < np.array([3, 2, 1, 0, 0, 1, 0])[:, None]).astype(float)
    expected = walked(expected_walk(survival), survival, prompt=9, turn=1)
    loop = looped([4, 1, 2], [3, 0, 1], 4, prompt=9, turn=1)
    assert expected.pop("variance") == 0 and dict(expected) == dict(loop)


def test_prompts_of_one_side_only_are_counted():
    ours = prompts(np.random.default_rng(0), 5)
    assert compare(ours, ours[:3])["unpaired"] == 2
    with pytest.raises(ValueError, match="none of these prompts"):
        compare(ours, [record | {"id": "x"} for record in ours])
