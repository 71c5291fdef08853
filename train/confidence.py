"""Is the confidence head right about how far a block survives, and what would cutting blocks by it save?

The survival that it predicts for slot k is the product of its confidences up to k. Sequential temperature scaling fits one
temperature a slot, left to right, each minimising the expected calibration error (ECE) of that product.
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from train.simulate import Response, expected_walk

BINS = 20
GRID = np.geomspace(0.1, 10, 81)
THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


def reliability(predicted: np.ndarray, happened: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[BINS, 3]: weight, mean prediction and mean outcome of predictions [N] in equal bins of 0..1."""
    which = np.minimum((predicted * BINS).astype(int), BINS - 1)
    sums = np.stack([np.bincount(which, weights * values, BINS) for values in (np.ones_like(predicted), predicted, happened)], 1)
    return np.column_stack((sums[:, 0], sums[:, 1:] / np.maximum(sums[:, :1], 1e-12)))


def ece(predicted: np.ndarray, happened: np.ndarray, weights: np.ndarray) -> float:
    """Expected calibration error: mean distance of prediction and outcome over the bins, by their weight."""
    bins = reliability(predicted, happened, weights)
    return float(bins[:, 0] @ np.abs(bins[:, 1] - bins[:, 2]) / max(bins[:, 0].sum(), 1e-12))


def fit_temperatures(logits: np.ndarray, survival: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """One temperature a slot [B]. logits and survival [N, B], weights [N]."""
    temperatures, before = np.ones(logits.shape[1]), np.ones(len(logits))
    for slot in range(logits.shape[1]):
        errors = [ece(before * expit(logits[:, slot] / candidate), survival[:, slot], weights) for candidate in GRID]
        temperatures[slot] = GRID[int(np.argmin(errors))]
        before = before * expit(logits[:, slot] / temperatures[slot])
    return temperatures


def calibration(responses: list[Response]) -> dict:
    """ECE of the predicted survival before and after scaling, its reliability, and what thresholds on it save; None without data.

    Every anchor weighs what an engine visits it. Temperatures that judge a response were fitted on other responses (every second
    one), so that the error after is an honest one; those reported are fitted on all.
    """
    responses = [response for response in responses if len(response.survival)]
    if len(responses) < 2:
        return {}
    walks = [expected_walk(response.survival) for response in responses]
    scaled: list[np.ndarray] = [np.zeros(0)] * len(responses)
    for half in (0, 1):
        temperatures = fit_temperatures(*_stack(responses[1 - half :: 2], walks[1 - half :: 2]))
        for index in range(half, len(responses), 2):
            scaled[index] = expit(responses[index].confidence / temperatures).cumprod(1)
    logits, survival, visits = _stack(responses, walks)
    predictions = {"before": expit(logits).cumprod(1), "after": np.concatenate(scaled)}
    weights = np.repeat(visits, logits.shape[1])
    return {
        "temperatures": fit_temperatures(logits, survival, visits).tolist(),
        "ece": {name: ece(values.ravel(), survival.ravel(), weights) for name, values in predictions.items()},
        "reliability": {name: reliability(values.ravel(), survival.ravel(), weights).tolist() for name, values in predictions.items()},
        "thresholds": [_saving(responses, scaled, threshold) for threshold in THRESHOLDS],
    }


def _stack(responses: list[Response], walks: list) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    columns = ([r.confidence for r in responses], [r.survival for r in responses], [walk.visits for walk in walks])
    return tuple(map(np.concatenate, columns))


def _saving(responses: list[Response], predicted: list[np.ndarray], threshold: float) -> dict:
    """Drafts verified a forward and tokens a forward if blocks are cut at the first slot that survives with less than `threshold`."""
    forwards = drafted = tokens = 0.0
    for response, chance in zip(responses, predicted, strict=True):
        kept = chance >= threshold  # falls along the slots, so this is a prefix
        walk = expected_walk(response.survival * kept)
        forwards += walk.forwards
        drafted += walk.visits @ kept.sum(1)
        tokens += len(response.survival)
    return {"threshold": threshold, "drafts_per_forward": drafted / forwards, "tokens_per_forward": tokens / forwards}
