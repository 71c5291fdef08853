"""Closed loop, simulation, walk (F4) and the bigram baseline, with tiny random verifiers and drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from in_process import greedy
from tiny import write_recipe

from configs.load import load
from extract.hf import HFVerifier
from train.bigram import bigram_accepted, bigram_counts, bigram_factors, follower_table
from train.contract import DraftContract
from train.decode import speculate
from train.draft import Draft, initialise
from train.simulate import expected_walk, simulate, walk
from train.verifier import FrozenVerifier


def test_f4_walk():
    survival = accepting([3, 2, 1, 0, 0, 0, 0, 0])
    assert walk(survival) == [4, 1, 1, 1, 1] and survival.sum(1).mean() + 1 == 1.75
    expected = expected_walk(survival)
    assert (expected.forwards, expected.variance) == (5, 0) and expected.visits.tolist() == [1, 0, 0, 0, 1, 1, 1, 1]


def test_walk_cuts_the_last_block():
    assert walk(accepting([8, 8, 8])) == [3] and walk(accepting([])) == []
    assert expected_walk(accepting([8, 8, 8])).emitted.tolist() == [3, 2, 1]


def accepting(counts: list[int]) -> np.ndarray:
    return (np.arange(8) < np.array(counts).reshape(-1, 1)).astype(float)


@pytest.fixture(scope="module")
def pieces(tiny_verifier, tmp_path_factory):
    """A float64 verifier, a draft that copies it well enough to be accepted sometimes, and prompts of several lengths."""
    path = tiny_verifier("llama")
    config = load(write_recipe(tmp_path_factory.mktemp("decode"), path))
    verifier = HFVerifier(path, "float64", config.draft.taps)
    frozen = FrozenVerifier.load(path, torch.float32, torch.device("cpu"))
    draft = Draft(DraftContract.resolve(config))
    initialise(draft, 0)
    random = np.random.default_rng(0)
    prompts = [
        random.integers(4, verifier.vocab_size, size=size).tolist() for size in (1, 2, 3, 4, 5, 6, 8, 9, 11, 13, 16, 19, 21, 25, 30, 34)
    ]
    # A Markov head that knows the verifier's answers makes the random draft right now and then.
    rows = [{"input_ids": np.array(greedy(verifier, prompt, 48)), "loss_mask": np.ones(48, np.uint8)} for prompt in prompts]
    rows = [row for row in rows if len(row["input_ids"]) == 48]
    first, second = bigram_factors(bigram_counts(rows, verifier.vocab_size), draft.spec.markov_rank)
    draft.markov_head.markov_w1.weight.data.copy_(first)
    draft.markov_head.markov_w2.weight.data.copy_(10 * second)
    return verifier, frozen, draft, prompts


def test_the_draft_changes_no_token_and_saves_forwards(pieces):
    verifier, frozen, draft, prompts = pieces
    results = speculate(verifier, draft, frozen, prompts, max_tokens=48)
    for prompt, result in zip(prompts, results):
        assert result.response_ids == greedy(verifier, prompt, 48)
        assert sum(result.emitted) == len(result.response_ids) - 1
    accepted = [count for result in results for count in result.accepted]
    assert max(accepted) >= 1 and np.mean([np.mean(result.emitted) for result in results]) > 1.02


def test_closed_loop_and_simulation_walk_alike(pieces):
    verifier, frozen, draft, prompts = pieces
    for prompt, result in zip(prompts, speculate(verifier, draft, frozen, prompts, max_tokens=48)):
        token_ids = prompt + result.response_ids
        states = verifier.prefill([token_ids])[0]
        (response,) = simulate(draft, frozen, token_ids, [(len(prompt), len(token_ids))], states)
        assert walk(response.survival) == result.emitted


def test_a_prompt_alone_decodes_as_in_a_batch(pieces):
    verifier, frozen, draft, prompts = pieces
    together = speculate(verifier, draft, frozen, prompts, max_tokens=20)
    alone = [speculate(verifier, draft, frozen, [prompt], max_tokens=20)[0] for prompt in prompts]
    assert [result.emitted for result in together] == [result.emitted for result in alone]


def test_bigrams():
    rows = [
        {"input_ids": np.array([5, 6, 7, 6, 7, 6, 8]), "loss_mask": np.array([0, 1, 1, 1, 1, 1, 1])},
        {"input_ids": np.array([9, 7, 9]), "loss_mask": np.array([1, 0, 0])},  # nothing generated after another token
    ]
    counts = bigram_counts(rows, 10)
    follower = follower_table(counts)
    assert follower == {5: 6, 6: 7, 7: 6}
    assert bigram_accepted(follower, [5, 6, 7, 6, 8], block_size=3) == [3, 2, 1, 0]
    first, second = bigram_factors(counts, 4)
    bias = first @ second.mT
    assert bias[6, 7] > bias[6, 9] and bias[5, 6] > bias[5, 9]
