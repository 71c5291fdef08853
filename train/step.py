"""Forward pass of one packed batch: blocks of every document, and the raw sums that the objective and the log need."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import Loss
from train.attention import Packing
from train.batch import Batch, Document, Sample
from train.draft import Draft, slot_positions
from train.objective import Slots, confidence_sum, normaliser, slot_terms, slot_weights
from train.verifier import FrozenVerifier

SUMS = ("normaliser", "slots", "blocks", "ce", "tv", "accepted", "accepted_run", "confidence_error", "tokens", "samples")


@dataclass
class Sums:
    """Raw sums over the valid slots of a batch, ready to be added over micro-steps and ranks.

    objective: differentiable scalar · counts: fp64 [len(SUMS)], in the order of SUMS · per_slot: fp64 [2, B], valid and
    accepted slots by position in the block.
    """

    objective: Tensor
    counts: Tensor
    per_slot: Tensor


def run(draft: Draft, frozen: FrozenVerifier, batch: Batch, block_size: int, loss: Loss, device: torch.device) -> Sums:
    """Objective of one micro-step; only valid slots reach the head. A batch without any makes its pass all the same, since the
    collectives of sharded parameters are in it, on a stand-in that counts for nothing."""
    states = batch.states.to(device, non_blocking=True)
    documents, counted = [document for document in batch.documents if document.valid.any()], 1.0
    if not documents:
        documents, counted, states = [_stand_in(block_size)], 0.0, states.new_zeros(2, *states.shape[1:])
    ids, positions = (torch.zeros(len(states), dtype=torch.int64) for _ in range(2))
    for document in documents:
        ids[document.start : document.stop] = torch.from_numpy(document.sample.token_ids)
        positions[document.start : document.stop] = torch.arange(document.stop - document.start)
    ids, positions = ids.to(device), positions.to(device)
    first = torch.cat([document.start + document.anchors for document in documents]).to(device)  # packed row of each anchor
    valid = torch.cat([document.valid for document in documents]).to(device)
    ends = list(accumulate((len(document.anchors) for document in documents), initial=0))
    packing = Packing([slice(document.start, document.stop) for document in documents], [slice(*pair) for pair in pairwise(ends)])

    slots = frozen.slot_embeddings(ids[first], draft.spec.mask_token_id, block_size)
    taps = states.flatten(1)[:, : -states.shape[2]].to(torch.float32)
    hidden = draft(taps[None], positions[None], slots[None], positions[first][None], packing)[0][valid]
    row = slot_positions(first, block_size)[valid]  # of the token right before the label, whose teacher predicts it
    previous, labels = ids[row], ids[row + 1]
    weights = counted * slot_weights(block_size, loss.decay_gamma, device).expand_as(valid)[valid]

    distinct, teacher_row = row.unique(return_inverse=True)
    embedding = F.embedding(previous, draft.markov_head.markov_w1.weight)
    taught = Slots(hidden, embedding, labels, weights, frozen.final_norm(states[distinct, -1]), teacher_row)
    terms = slot_terms(taught, draft.markov_head.markov_w2.weight, frozen.heads, loss)
    logits = draft.confidence_head(hidden, embedding)
    overlap = 1 - terms.tv
    objective = terms.weighted_sum + loss.confidence * confidence_sum(logits, overlap, weights)

    accepted = torch.zeros(valid.shape, dtype=torch.bool, device=device)
    accepted[valid] = terms.accepted
    counts = [
        normaliser(weights, loss.denominator),
        len(weights),
        len(valid),
        terms.ce.sum(),
        terms.tv.sum(),
        terms.accepted.sum(),
        accepted.cumprod(1).sum(),
        (logits.detach().sigmoid() - overlap).abs().sum(),
    ]
    counts = [*(counted * float(count) for count in counts), batch.tokens, len(batch.documents)]
    per_slot = counted * torch.stack((valid.sum(0), accepted.sum(0))).double().cpu()
    return Sums(objective, torch.tensor(counts, dtype=torch.float64), per_slot)


def _stand_in(block_size: int) -> Document:
    sample = Sample(-1, np.zeros(2, np.int64), np.ones(2, np.uint8))
    return Document(sample, 0, 2, torch.tensor([0]), torch.arange(block_size)[None] == 0)
