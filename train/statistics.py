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
Sums = dict[str, np.ndarray]  # key -> [RESAMPLES] sums of a set over resampled conversations


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


def resample(records: list[dict], seed: int = 0) -> tuple[dict[str, Sums], int]:
    """Sums of each set over conversations drawn with replacement, and the degrees of freedom left.

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
        count = len(table)
        weights = np.ones((1, 1)) if count == 1 else random.multinomial(count - 1, [1 / count] * count, RESAMPLES) * count / (count - 1)
        drawn[name] = dict(zip(keys, np.broadcast_to(weights @ table, (RESAMPLES, len(keys))).T, strict=True))
    return drawn, sum(len(conversations) - 1 for conversations in units.values())


def interval(samples: np.ndarray, freedom: int) -> list[float] | None:
    """LEVEL interval of resampled values: percentiles, widened as Student's t is against the normal for small samples."""
    samples = samples[np.isfinite(samples)]
    if freedom < 1 or not len(samples):
        return None
    tail = norm.cdf(t.ppf((1 - LEVEL) / 2, freedom))
    return [float(value) for value in np.quantile(samples, [tail, 1 - tail])]


def ratio(sums: dict, part: str = "") -> np.ndarray | float:
    """Tokens per forward, of "/turn n" or "/context c" where asked."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(sums["tokens" + part], sums["forwards" + part])


def total(sets: dict[str, dict]) -> dict:
    """Sums over sets."""
    return {key: sum(sums[key] for sums in sets.values()) for key in next(iter(sets.values()))}


def _plain(records: list[dict]) -> dict[str, dict]:
    keys = {key for record in records for key in record["sums"]}
    sets: dict[str, dict] = {}
    for record in records:
        sums = sets.setdefault(record["set"], dict.fromkeys(keys, 0.0))
        for key, value in record["sums"].items():
            sums[key] += value
    return dict(sorted(sets.items()))


def summarise(records: list[dict], block: int) -> dict:
    """Tokens per forward over all prompts, its mean over sets, and by set, turn and context length; acceptance by position: share of
    forwards that accept at least k drafts, of those that accept k - 1, and that accept exactly k. Each with its interval."""
    plain, (drawn, freedom) = _plain(records), resample(records)
    sums, samples = total(plain), total(drawn)
    sizes = Counter(record["set"] for record in records)
    conversations = {name: len({record["conversation"] for record in records if record["set"] == name}) for name in plain}

    def measured(value, resampled, dof=freedom) -> dict:
        return {"value": float(value), "interval": interval(resampled, dof)}

    def parts(kind: str) -> dict:
        found = sorted({int(key.split(f"/{kind} ")[1]) for key in sums if key.startswith(f"forwards/{kind} ")})
        return {
            str(at): measured(ratio(sums, f"/{kind} {at}"), ratio(samples, f"/{kind} {at}"))
            | {"forwards": sums[f"forwards/{kind} {at}"], "tokens": sums[f"tokens/{kind} {at}"]}
            for at in found
        }

    def accepted(table: dict) -> np.ndarray:
        return np.stack([np.asarray(table[key], float) for key in ("forwards", *(f"at_least/{k}" for k in range(1, block + 1)))])

    reached, reached_drawn = accepted(sums), accepted(samples)
    with np.errstate(divide="ignore", invalid="ignore"):
        conditional, conditional_drawn = reached[1:] / reached[:-1], reached_drawn[1:] / reached_drawn[:-1]
    return {
        "tokens_per_forward": measured(ratio(sums), ratio(samples)),
        "mean_over_sets": measured(np.mean([*map(ratio, plain.values())]), np.mean([*map(ratio, drawn.values())], axis=0)),
        "tokens": sums["tokens"],
        "forwards": sums["forwards"],
        "accepted_per_forward": float(reached[1:].sum() / reached[0]),
        "sets": {
            name: measured(ratio(plain[name]), ratio(drawn[name]), conversations[name] - 1)
            | {"prompts": sizes[name], "forwards": plain[name]["forwards"]}
            for name in plain
        },
        "turns": parts("turn"),
        "context": parts("context"),
        "unconditional": [measured(a / reached[0], b / reached_drawn[0]) for a, b in zip(reached[1:], reached_drawn[1:])],
        "conditional": [measured(a, b) for a, b in zip(conditional, conditional_drawn)],
        "histogram": (-np.diff([*reached, 0.0])).tolist(),
    }


def compare(ours: list[dict], reference: list[dict]) -> dict:
    """Ours against a reference on the same prompts: difference and ratio of tokens per forward over all prompts, over the mean of sets
    and by set, each with its interval, and the sets won and lost. Prompts that only one side answered are left out and counted."""
    other = {record["id"]: record["sums"] for record in reference}
    pairs = []
    for record in ours:
        if theirs := other.get(record["id"]):
            sums = {key: record["sums"][key] for key in ("tokens", "forwards")}
            sums |= {f"{key}/other": theirs[key] for key in sums}
            pairs.append(record | {"sums": sums})
    if not pairs:
        raise ValueError("the reference answered none of these prompts")
    plain, (drawn, freedom) = _plain(pairs), resample(pairs)
    counts = {name: len({pair["conversation"] for pair in pairs if pair["set"] == name}) for name in plain}

    def difference(sums: dict) -> tuple:
        mine, theirs = ratio(sums), ratio(sums, "/other")
        return mine - theirs, mine / theirs, mine, theirs

    def measured(value: tuple, resampled: tuple, dof: int) -> dict:
        names = ("difference", "ratio", "ours", "reference")
        return {name: {"value": float(a), "interval": interval(b, dof)} for name, a, b in zip(names, value, resampled)}

    def mean_of_sets(sets: dict[str, dict]) -> tuple:
        mine, theirs = (np.mean([ratio(sums, part) for sums in sets.values()], axis=0) for part in ("", "/other"))
        return mine - theirs, mine / theirs, mine, theirs

    sets = {name: measured(difference(plain[name]), difference(drawn[name]), counts[name] - 1) for name in plain}
    signs = [np.sign(entry["difference"]["value"]) for entry in sets.values()]
    return {
        "all": measured(difference(total(plain)), difference(total(drawn)), freedom),
        "mean_over_sets": measured(mean_of_sets(plain), mean_of_sets(drawn), freedom),
        "sets": sets,
        "wins": signs.count(1),
        "losses": signs.count(-1),
        "unpaired": len(ours) + len(reference) - 2 * len(pairs),
    }
