"""Anchors by the visit probability of an engine's walk: the distribution that is drawn is the exact one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drafts import random_draft, recipe
from tiny import VOCAB

from extract.hf import HFVerifier
from train.anchors import draw_anchors, draw_visited
from train.batch import Batch, Sample, lay_out
from train.contract import DraftContract
from train.simulate import expected_walk, simulate, walk
from train.verifier import FrozenVerifier
from train.visited import put_on_walk

MASK = np.array([0] * 5 + [1] * 30 + [0] * 4 + [1] * 20 + [0])  # two answers, 29 and 19 anchors


@pytest.mark.parametrize("count", [3, 9, 100])
def test_each_position_is_drawn_as_often_as_it_is_visited(count):
    visits = np.array([0.0, 1.0, 0.6, 0.25, 0.0, 0.9, 1.0, 0.05, 0.7, 1.0, 0.5, 1.0])
    drawn, draws = np.zeros(len(visits)), 4000
    for seed in range(draws):
        anchors = draw_visited(visits, count, seed, 1, 2)
        drawn[anchors] += 1
        assert abs(len(anchors) - min(count, visits.sum())) < 1 and (np.diff(anchors) > 0).all()
    expected = visits * min(1, count / visits.sum())
    assert np.abs(drawn / draws - expected) == pytest.approx(0, abs=4 * (0.25 / draws) ** 0.5)
    assert (drawn[expected == 0] == 0).all() and (drawn[expected == 1] == draws).all()


@pytest.fixture(scope="module")
def drafted(tiny_verifier, tmp_path_factory):
    """A random draft, its verifier's frozen parts, a sample of two answers, a batch of it, and what draws its anchors."""
    config = recipe(tmp_path_factory.mktemp("visited"), tiny_verifier("llama"), "full", block_size=6)
    verifier = HFVerifier(config.verifier.path, "float32", config.draft.taps)
    sample = Sample(7, np.random.default_rng(0).integers(4, VOCAB - 2, len(MASK)), MASK)
    frozen = FrozenVerifier.load(config.verifier.path, torch.float32, verifier.device)
    states = verifier.prefill([sample.token_ids.tolist()])[0]
    return config, random_draft(DraftContract.resolve(config)), frozen, sample, states


def draw(drafted, epoch: int, rule: str, count: int, block: int = 4) -> tuple[np.ndarray, list]:
    """The anchors that are drawn in an epoch, and the answers as they are simulated with blocks of `block`."""
    config, draft, frozen, sample, states = drafted
    keys = {"evaluate": {"rule": rule, "temperature": 8.0}, "train": {"num_anchors": count}}  # hot: much is accepted of a random draft
    config = config.model_copy(update={name: getattr(config, name).model_copy(update=values) for name, values in keys.items()})
    batch = Batch(lay_out([sample], epoch, block, config), states, True)
    assert batch.documents[0].anchors.tolist() == draw_anchors(MASK, count, config.seed, epoch, sample.row).tolist()
    put_on_walk(draft, frozen, batch, epoch, block, config)
    (document,) = batch.documents
    assert document.valid.shape == (len(document.anchors), block) and document.valid[:, 0].all()
    other = draft.spec.model_copy(update={"block_size": block})
    spec, draft.spec = draft.spec, other
    responses = simulate(draft, frozen, sample.token_ids.tolist(), [(5, 35), (39, 59)], states, rule, 8.0)
    draft.spec = spec
    return document.anchors.numpy(), responses


def test_a_greedy_walk_is_the_engines(drafted):
    anchors, responses = draw(drafted, 0, "greedy", 100)
    steps = [first + np.cumsum([0, *walk(response.survival)])[:-1] for first, response in zip((5, 39), responses)]
    assert anchors.tolist() == np.concatenate(steps).tolist()


def test_sampled_walks_are_drawn_by_their_visits(drafted):
    for epoch in range(5):
        anchors, responses = draw(drafted, epoch, "standard", 8)
        visits = np.zeros(len(MASK))
        for (start, stop), response in zip([(5, 34), (39, 58)], responses):
            visits[start:stop] = expected_walk(response.survival).visits
        assert visits.sum() > 8 and visits[visits > 0].std() > 0.01
        assert anchors.tolist() == draw_visited(visits, 8, drafted[0].seed, epoch, drafted[3].row).tolist()
