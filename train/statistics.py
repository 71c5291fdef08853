"""What a measurement says and how sure it is: ratios of sums over prompts, with bootstrap intervals over conversations.

A record is one answered prompt: {"id", "set", "conversation", "sums"}. `sums` are additive: "tokens" emitted after the first
one and verifier "forwards" after the prefill, "at_least/k" forwards that accepted at least k drafts, and tokens and forwards
again by "/turn n" and "/context c" (context lengths from c up to twice that). Tokens per forward is their ratio.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from scipy.stats import norm, t

from train.simulate import Walk

RESAMPLES, LEVEL = 4000, 0.95
Sums = dict[str, np.ndarray]  # key -> [1 + RESAMPLES] sums


def looped(emitted: list[int], accepted: list[int], block: int, prompt: int, turn: int) -> Counter:
    """Sums of one answer of the closed loop."""
    sums: Counter = Counter({f"at_least/{k}": sum(count >= k for count in accepted) for k in range(1, block + 1)})
    _add(sums, emitted, [1] * len(emitted), np.cumsum([prompt, *emitted])[:-1], turn)
    return sums


def walked(walk: Walk, survival: np.ndarray, prompt: int, turn: int) -> Counter:
    """Sums of one answer in expectation over the engine's draws."""
    sums = Counter({f"at_least/{k}": value for k, value in enumerate((walk.visits @ survival).tolist(), 1)})
    _add(sums, walk.visits * walk.emitted, walk.visits, prompt + np.arange(len(walk.visits)), turn)
    sums["variance"] = walk.variance
    return sums


def _add(sums: Counter, tokens, forwards, contexts, turn: int) -> None:
    for emitted, visits, context in zip(tokens, forwards, contexts, strict=True):
        for part in ("", f"/turn {turn}", f"/context {1 << int(context).bit_length() - 1}"):
            sums["tokens" + part] += float(emitted)
            sums["forwards" + part] += float(visits)


def resample(records: list[dict], seed: int = 0) -> tuple[dict[str, Sums], dict[str, int]]:
    """Sums of each set, and its degrees of freedom: [0] as measured, the others over conversations drawn with replacement.

    Turns of a conversation stay together. A set of n conversations draws n - 1 of them, counted n / (n - 1) times, so that small sets
    have the variance that they should; a set of one is taken as it is.
    """
    units: dict[str, dict[str, Counter]] = defaultdict(lambda: defaultdict(Counter))
    for record in records:
        units[record["set"]][record["conversation"]].update(record["sums"])
    keys = sorted({key for record in records for key in record["sums"]})
    random, drawn = np.random.default_rng(seed), {}
    for name, conversations in sorted(units.items()):
        table = np.array([[sums[key] for key in keys] for sums in conversations.values()], float)
        weights = np.ones((1 + RESAMPLES, count := len(table)))
        if count > 1:
            weights[1:] = random.multinomial(count - 1, [1 / count] * count, RESAMPLES) * count / (count - 1)
        drawn[name] = dict(zip(keys, (weights @ table).T, strict=True))
    return drawn, {name: len(units[name]) - 1 for name in drawn}


def measured(samples: np.ndarray, freedom: int) -> dict:
    """A statistic of `resample`'s sums as {"value", "interval"}: percentiles, widened as Student's t is against the normal for small
    samples. None where there is nothing: no forward got so far, no second conversation."""
    drawn = samples[1:][np.isfinite(samples[1:])]
    tail = norm.cdf(t.ppf((1 - LEVEL) / 2, freedom)) if freedom > 0 else None
    interval = np.quantile(drawn, [tail, 1 - tail]).tolist() if tail is not None and len(drawn) else None
    return {"value": float(samples[0]) if np.isfinite(samples[0]) else None, "interval": interval}


def ratio(sums: Sums, part: str = "") -> np.ndarray:
    """Tokens per forward, of "/turn n" or "/context c" where asked."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums["tokens" + part] / sums["forwards" + part]


def estimate(records: list[dict]) -> tuple[float, float]:
    """Tokens per forward over all prompts and its standard error; infinite where a single conversation cannot tell."""
    sets, freedoms = resample(records)
    samples = ratio(total(sets))
    return float(samples[0]), float(np.std(samples[1:])) if sum(freedoms.values()) else float("inf")


def total(sets: dict[str, Sums]) -> Sums:
    """Sums over sets."""
    return {key: sum(sums[key] for sums in sets.values()) for key in next(iter(sets.values()))}


def summarise(records: list[dict], block: int) -> dict:
    """Tokens per forward over all prompts, its mean over sets, and by set, turn and context length; acceptance by position: share of
    forwards that accept at least k drafts, of those that accept k - 1, and that accept exactly k. Each with its interval."""
    sets, freedoms = resample(records)
    sums, freedom = total(sets), sum(freedoms.values())
    reached = np.stack([sums[key] for key in ("forwards", *(f"at_least/{k}" for k in range(1, block + 1)))])
    with np.errstate(divide="ignore", invalid="ignore"):
        conditional = reached[1:] / reached[:-1]

    def parts(kind: str) -> dict:
        found = sorted(int(key.split(f"/{kind} ")[1]) for key in sums if key.startswith(f"forwards/{kind} "))
        names = {str(at): f"/{kind} {at}" for at in found}
        return {at: measured(ratio(sums, part), freedom) | {"forwards": float(sums["forwards" + part][0])} for at, part in names.items()}

    answers = Counter(record["set"] for record in records)
    return {
        "tokens_per_forward": measured(ratio(sums), freedom),
        "mean_over_sets": measured(np.nanmean([*map(ratio, sets.values())], axis=0), freedom),
        "forwards": float(sums["forwards"][0]),
        "accepted_per_forward": float(reached[1:, 0].sum() / reached[0, 0]),
        "sets": {name: measured(ratio(sets[name]), freedoms[name]) | {"answers": answers[name]} for name in sets},
        "turns": parts("turn"),
        "context": parts("context"),
        "unconditional": [measured(count / reached[0], freedom) for count in reached[1:]],
        "conditional": [measured(share, freedom) for share in conditional],
        "histogram": (reached[:, 0] - [*reached[1:, 0], 0.0]).tolist(),
    }


def compare(ours: list[dict], reference: list[dict]) -> dict:
    """Ours against a reference on the same prompts: difference and ratio of tokens per forward over all prompts, over the mean of sets
    and by set, each with its interval, and the sets won and lost. Prompts that only one side answered are left out and counted."""
    other, pairs = {record["id"]: record["sums"] for record in reference}, []
    for record in ours:
        if theirs := other.get(record["id"]):
            sums = {key: record["sums"][key] for key in ("tokens", "forwards")}
            pairs.append(record | {"sums": sums | {f"{key}/other": theirs[key] for key in sums}})
    if not pairs:
        raise ValueError("the reference answered none of these prompts")
    drawn, freedoms = resample(pairs)

    def against(sums: list[Sums], freedom: int) -> dict:
        mine, theirs = (np.nanmean([ratio(part, side) for part in sums], axis=0) for side in ("", "/other"))
        values = {"difference": mine - theirs, "ratio": mine / theirs, "ours": mine, "reference": theirs}
        return {name: measured(samples, freedom) for name, samples in values.items()}

    freedom, sets = sum(freedoms.values()), {name: against([drawn[name]], freedoms[name]) for name in drawn}
    signs = [np.sign(entry["difference"]["value"] or 0) for entry in sets.values()]
    return {
        "all": against([total(drawn)], freedom),
        "mean_over_sets": against([*drawn.values()], freedom),
        "sets": sets,
        "wins": signs.count(1),
        "losses": signs.count(-1),
        "unpaired": len(ours) + len(reference) - 2 * len(pairs),
    }
