"""Bigrams of the tokens that the verifier generated: a start for the Markov head, and the baseline that a draft must beat."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import coo_matrix, csr_matrix
from scipy.sparse.linalg import svds
from torch import Tensor

SMOOTHING = 1.0  # pseudo-count of the unigram in a bigram row


def bigram_counts(dataset, vocabulary: int) -> csr_matrix:
    """How often token b (column, generated) followed token a (row) in a data set: fp64 [V, V], sparse."""
    pairs = [(record["input_ids"], record["loss_mask"][1:] == 1) for record in dataset]
    before = np.concatenate([ids[:-1][generated] for ids, generated in pairs])
    after = np.concatenate([ids[1:][generated] for ids, generated in pairs])
    return coo_matrix((np.ones(len(before)), (before, after)), shape=(vocabulary, vocabulary)).tocsr()


def bigram_factors(counts: csr_matrix, rank: int) -> tuple[Tensor, Tensor]:
    """Markov factors W1, W2 fp32 [V, r] with W1[a] . W2[b] near log P(b | a) - log P(b).

    A truncated SVD of the smoothed PMI of observed pairs, which is 0 for pairs never seen; the last column is the unigram's.
    """
    vocabulary = counts.shape[0]
    unigram = np.asarray(counts.sum(0)).ravel()
    unigram = (unigram + 1) / (unigram + 1).sum()
    pmi = counts.copy()
    pmi.data = np.log1p(pmi.data / (SMOOTHING * unigram[pmi.indices]))
    left, values, right = svds(pmi, k=min(rank - 1, min(counts.shape) - 1), random_state=0)
    first, second = np.zeros((vocabulary, rank)), np.zeros((vocabulary, rank))
    first[:, : len(values)] = left * np.sqrt(values)
    second[:, : len(values)] = right.T * np.sqrt(values)
    frequent = np.log(unigram / unigram.min())
    first[:, -1], second[:, -1] = 1.0, frequent - frequent.mean()
    return torch.from_numpy(first).float(), torch.from_numpy(second).float()


def follower_table(counts: csr_matrix) -> dict[int, int]:
    """Each token's most frequent follower; among equals the smallest id."""
    starts = counts.indptr
    rows = np.flatnonzero(np.diff(starts))
    return {int(row): int(counts.indices[starts[row] + counts.data[starts[row] : starts[row + 1]].argmax()]) for row in rows}


def bigram_accepted(follower: dict[int, int], response_ids: list[int], block_size: int) -> list[int]:
    """The baseline that needs no draft: chains of each token's most frequent follower in the training data."""
    counts = []
    for position in range(len(response_ids) - 1):
        token, count = response_ids[position], 0
        for truth in response_ids[position + 1 : position + 1 + block_size]:
            token = follower.get(token, -1)
            if token != truth:
                break
            count += 1
        counts.append(count)
    return counts
