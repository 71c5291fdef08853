"""Validation while training: the held-out responses' exact walk, every response token an anchor, so that numbers are comparable
over steps and runs; the samples are shared out over the ranks."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.schema import Config
from store.dataset import Dataset
from train.batch import Sample
from train.draft import Draft
from train.feed import Feed
from train.simulate import expected_walk, simulate
from train.verifier import FrozenVerifier
from train.world import World


def held_out(config: Config) -> list[dict] | None:
    """The first `train.validation_samples` rows that data preparation held out; None where it held out none."""
    folder = config.data.path / "validation"
    if not (folder / "state.json").exists():
        return None
    return list(islice(Dataset(folder), config.train.validation_samples)) or None


@torch.no_grad()
def validate(draft: Draft, frozen: FrozenVerifier, feed: Feed, rows: list[dict], ranks: World, config: Config) -> dict:
    """Tokens per forward, and the share of forwards that accept at least k drafts. Every rank calls it and gets the same."""
    draft = whole(draft, ranks.device)
    sums = torch.zeros(2 + draft.spec.block_size, dtype=torch.float64)
    for index in range(ranks.rank, len(rows), ranks.size):
        row = rows[index]
        sample = Sample(-1, row["input_ids"], row["loss_mask"])
        states = feed.states(sample)
        if states is None:
            continue  # counted in the feed's drops
        with torch.autocast(ranks.device.type, torch.bfloat16, enabled=ranks.device.type == "cuda"):
            rule = config.evaluate.rule, config.evaluate.temperature
            responses = simulate(draft, frozen, sample.token_ids.tolist(), spans(sample.loss_mask), states, *rule)
        for response in responses:
            walk = expected_walk(response.survival)
            sums += torch.tensor([len(response.survival), walk.forwards, *(walk.visits @ response.survival)])
    ranks.sum_([sums])
    tokens, forwards, *accepted = sums.tolist()
    return {"tokens_per_forward": tokens / max(forwards, 1e-9), "accepted": [count / max(forwards, 1e-9) for count in accepted]}


def spans(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """[start, stop) of every response: runs of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], loss_mask != 0, [0]))))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def whole(draft: Draft, device: torch.device) -> Draft:
    """The draft, or a copy with whole parameters where ranks hold parts, for they do not draft equally often. Every rank calls it."""
    if not any(isinstance(parameter, DTensor) for parameter in draft.parameters()):
        return draft
    copy = Draft(draft.spec).to(device)
    weights: dict[str, Tensor] = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in draft.state_dict().items()}
    copy.load_state_dict(weights)
    return copy
