"""Anchors where an engine drafts (`train.anchors: walk`), in place of every token alike.

An engine walks over a text: easy stretches in a few long steps, hard ones token by token, so it drafts at hard tokens more often than
uniform anchors say. The probability that it drafts at a token follows from the survival of drafts at all tokens before
(`train.simulate`). It is the draft's own, as it is at this step: nothing has to be kept, so a resumed run draws the same anchors; and
each sample is drawn for by itself, so another number of ranks does, too (but for argmax ties within rounding). The price is a forward
pass over all response tokens of each sample. Guesses that cost less say less: acceptance that only depends on the slot makes all
tokens alike again, and a bigram's walk stops at nearly every token, so it knows nothing of the long steps of a good draft.
"""

from __future__ import annotations

import numpy as np
import torch

from configs.schema import Config
from train.anchors import draw_visited, valid_slots
from train.batch import Batch
from train.draft import Draft
from train.simulate import expected_walk, simulate
from train.validate import spans
from train.verifier import FrozenVerifier


def put_on_walk(draft: Draft, frozen: FrozenVerifier, batch: Batch, epoch: int, block_size: int, config: Config) -> None:
    """Draw the anchors of a batch's documents again: by the walk of `draft`, whose parameters are whole, with `block_size` slots, under
    the rule of `evaluate`."""
    for document in batch.documents:
        sample, states = document.sample, batch.states[document.start : document.stop]
        visits, parts = np.zeros(len(sample.token_ids)), spans(sample.loss_mask)
        rule = config.evaluate.rule, config.evaluate.temperature
        responses = simulate(draft, frozen, sample.token_ids.tolist(), parts, states, *rule, slots=block_size)
        for (start, stop), response in zip(parts, responses, strict=True):
            visits[start : stop - 1] = expected_walk(response.survival).visits
        anchors = draw_visited(visits, config.train.num_anchors, config.seed, epoch, sample.row)
        document.anchors = torch.from_numpy(anchors)
        document.valid = torch.from_numpy(valid_slots(sample.loss_mask, anchors, block_size))
