"""Forward pass of one packed batch: blocks of every document, and the raw sums that the objective and the log need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import Loss
from train.batch import Batch, Document
from train.draft import Draft
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
    """Objective of one micro-step; only valid slots reach the head."""
    weights_by_slot = slot_weights(block_size, loss.decay_gamma, device)
    states = batch.states.to(device, non_blocking=True)
    parts = [part for document in batch.documents if (part := _document(draft, frozen, document, states, block_size, device))]
    if not parts:
        counts = torch.tensor([0.0] * (len(SUMS) - 2) + [batch.tokens, len(batch.documents)], dtype=torch.float64)
        return Sums(torch.zeros((), device=device), counts, torch.zeros(2, block_size).double())
    hidden, previous, labels, rows, position, valid = (torch.cat(column) for column in zip(*parts, strict=True))

    distinct, teacher_row = rows.unique(return_inverse=True)
    weights = weights_by_slot[position]
    slots = Slots(hidden, previous, labels, weights, frozen.final_norm(states[distinct, -1]), teacher_row)
    markov = draft.markov_head
    terms = slot_terms(slots, markov.markov_w1.weight, markov.markov_w2.weight, frozen.heads, loss)
    logits = draft.confidence_head(hidden, F.embedding(previous, markov.markov_w1.weight))
    overlap = 1 - terms.tv
    objective = terms.weighted_sum + loss.confidence * confidence_sum(logits, overlap, weights)

    accepted = torch.zeros(valid.shape, dtype=torch.bool, device=device)
    accepted[valid] = terms.accepted
    run_length = accepted.cumprod(1).sum()
    counts = [
        normaliser(weights, loss.denominator),
        len(weights),
        len(valid),
        terms.ce.sum(),
        terms.tv.sum(),
        terms.accepted.sum(),
        run_length,
        (logits.detach().sigmoid() - overlap).abs().sum(),
        batch.tokens,
        len(batch.documents),
    ]
    per_slot = torch.stack((valid.sum(0), accepted.sum(0))).double().cpu()
    return Sums(objective, torch.tensor([float(count) for count in counts], dtype=torch.float64), per_slot)


def _document(draft: Draft, frozen: FrozenVerifier, document: Document, states: Tensor, block_size: int, device: torch.device):
    """Valid slots of one document: hidden [S, Hd], previous, label, packed teacher row, slot number [S], valid [A, B]; None
    without any."""
    valid = document.valid.to(device)
    if not valid.any():
        return None
    tokens = torch.from_numpy(document.sample.token_ids).to(device, torch.int64)
    anchors = document.anchors.to(device)
    taps = states[document.start : document.stop, :-1].flatten(1).to(torch.float32)
    context = draft.context(taps[None], torch.arange(len(tokens), device=device)[None])
    slots = frozen.slot_embeddings(tokens[anchors], draft.spec.mask_token_id, block_size)
    hidden = draft.block(slots[None], anchors[None], context)[0][valid]
    slot = torch.arange(block_size, device=device).expand_as(valid)[valid]
    position = (anchors[:, None] + torch.arange(block_size, device=device))[valid]  # of the token right before the label
    return hidden, tokens[position], tokens[position + 1], document.start + position, slot, valid
