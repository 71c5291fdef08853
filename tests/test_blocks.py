"""Anchors, validity, masks and positions of draft blocks (fixtures F1 and F6 of the algorithm's specification)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train import attention
from train.anchors import draw_anchors, valid_slots
from train.attention import Packing, attend, block_visible, context_visible, flex
from train.contract import DraftContract
from train.draft import Draft, initialise
from train.objective import slot_weights

SPEC = DraftContract(
    taps=(1, 2),
    block_size=3,
    mask_token_id=3,
    layer_types=("full_attention", "full_attention"),
    hidden_size=16,
    intermediate_size=24,
    gqa={"heads": 4, "kv_heads": 2, "head_dim": 8, "rope_theta": 10000.0},
    vocab_size=50,
    draft_vocab_size=50,
    max_position_embeddings=100,
    rms_norm_eps=1e-5,
    markov_rank=4,
    loss_terms={"ce": 0.1, "l1": 0.9},
)


def test_f1_validity_ends_with_the_document():
    assert valid_slots(np.ones(6, np.uint8), np.array([3]), 3).tolist() == [[True, True, False]]
    assert valid_slots(np.ones(4, np.uint8), np.array([2]), 3).tolist() == [[True, False, False]]


def test_f1_context_is_strictly_before_the_anchor():
    visible = context_visible(torch.tensor([3]), 6, 3, None)[0]
    assert visible.int().tolist() == [[1, 1, 1, 0, 0, 0]] * 3
    assert block_visible(3, causal=False, window=None).all()


def test_f1_window_is_measured_from_the_query():
    visible = context_visible(torch.tensor([3]), 6, 3, window=2)[0]
    assert [row.nonzero().flatten().tolist() for row in visible] == [[2], [], []]
    own = block_visible(3, causal=True, window=2)
    assert [row.nonzero().flatten().tolist() for row in own] == [[0], [0, 1], [1, 2]]


def test_f6_decay_sums():
    assert slot_weights(7, 4.0).sum() == pytest.approx(3.7352, abs=1e-4)
    assert slot_weights(8, 4.0).sum() == pytest.approx(3.9090, abs=1e-4)
    assert slot_weights(8, 4.0)[0] == 1


@given(st.lists(st.integers(0, 1), min_size=2, max_size=60), st.integers(1, 9), st.integers(1, 20))
def test_every_valid_slot_predicts_a_generated_token_and_follows_valid_ones(mask, block_size, count):
    mask = np.array(mask, np.uint8)
    anchors = draw_anchors(mask, count, seed=1, epoch=2, sample=3)
    eligible = [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]
    assert len(anchors) == min(count, len(eligible)) and sorted(set(anchors.tolist())) == anchors.tolist()
    assert set(anchors.tolist()) <= set(eligible)
    for anchor, valid in zip(anchors, valid_slots(mask, anchors, block_size)):
        follow = mask[anchor + 1 : anchor + 1 + block_size].tolist() + [0] * block_size
        assert valid.tolist() == [all(follow[: slot + 1]) for slot in range(block_size)]


def test_anchors_depend_on_seed_epoch_and_sample_alone():
    mask = np.ones(400, np.uint8)
    draws = [draw_anchors(mask, 16, *key).tolist() for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0))]
    assert draws[0] == draws[4] and len({tuple(draw) for draw in draws}) == 4


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 4), (False, 5)])
def test_two_part_attention_is_softmax_over_both_parts(causal, window):
    torch.manual_seed(0)
    heads, groups, dim, length, block = 4, 2, 8, 11, 3
    anchors = torch.tensor([[0, 2, 7, 11]])
    query = torch.randn(1, 4, block, heads, dim, dtype=torch.float64)
    context = [torch.randn(1, length, groups, dim, dtype=torch.float64) for _ in range(2)]
    own = [torch.randn(1, 4, block, groups, dim, dtype=torch.float64) for _ in range(2)]
    mixed = attend(query, tuple(context), tuple(own), anchors, causal, window)
    for a, anchor in enumerate(anchors[0].tolist()):
        for slot in range(block):
            for head in range(heads):
                group, position = head // (heads // groups), anchor + slot
                seen = [j for j in range(anchor) if window is None or position - j <= window - 1]
                other = [k for k in range(block) if (not causal or k <= slot) and (window is None or abs(slot - k) <= window - 1)]
                keys = torch.cat((context[0][0, seen, group], own[0][0, a, other, group]))
                values = torch.cat((context[1][0, seen, group], own[1][0, a, other, group]))
                expected = (keys @ query[0, a, slot, head]).softmax(0) @ values
                torch.testing.assert_close(mixed[0, a, slot, head], expected)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 4), (False, 5)])
def test_flex_attention_is_two_part_attention(causal, window):
    """What GPUs run, in its slow reference form: three documents, of which the second has no block."""
    torch.manual_seed(0)
    packing = Packing([slice(0, 9), slice(14, 34)], [slice(0, 3), slice(3, 5)])
    anchors = torch.tensor([[0, 4, 9, 7, 20]])
    query = torch.randn(1, 5, 3, 4, 16)
    context = [torch.randn(1, 36, 2, size) for size in (16, 24)]
    own = [torch.randn(1, 5, 3, 2, size) for size in (16, 24)]
    expected = attend(query, context, own, anchors, causal, window, packing)
    torch.testing.assert_close(flex(query, context, own, anchors, causal, window, packing), expected)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 4)])
def test_attention_of_a_few_blocks_at_a_time_is_that_of_all(monkeypatch, causal, window):
    """With gradients, though scores are computed twice and context after the last anchor is left out."""
    monkeypatch.setattr(attention, "SCORE_BYTES", 2 * 8 * 20 * 3 * 4)  # of two blocks
    anchors = torch.tensor([[0, 4, 7, 9, 20]])
    shapes = [(1, 5, 3, 4, 16), *((1, 20, 2, size) for size in (16, 24)), *((1, 5, 3, 2, size) for size in (16, 24))]
    inputs = [torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_() for shape in shapes]
    parts = attend(inputs[0], inputs[1:3], inputs[3:], anchors, causal, window, Packing([slice(0, 20)], [slice(0, 5)]))
    whole = attend(inputs[0], inputs[1:3], inputs[3:], anchors, causal, window)
    torch.testing.assert_close(parts, whole)
    for mine, reference in zip(*(torch.autograd.grad(mixed.square().sum(), inputs) for mixed in (parts, whole))):
        torch.testing.assert_close(mine, reference)


def test_states_at_or_after_an_anchor_change_nothing():
    draft = Draft(SPEC).double()
    initialise(draft, 0)
    torch.manual_seed(1)
    taps, positions = torch.randn(1, 12, 32, dtype=torch.float64), torch.arange(12)[None]
    slots, anchors = torch.randn(1, 2, 3, 16, dtype=torch.float64), torch.tensor([[4, 9]])
    before = draft.block(slots, anchors, draft.context(taps, positions))
    disturbed = taps.clone()
    disturbed[:, 4:] += 100
    after = draft.block(slots, anchors, draft.context(disturbed, positions))
    assert torch.equal(before[:, 0], after[:, 0]) and not torch.allclose(before[:, 1], after[:, 1])
    disturbed = taps.clone()
    disturbed[:, 3] += 1  # the last one that the first block may see
    assert not torch.allclose(before[:, 0], draft.block(slots, anchors, draft.context(disturbed, positions))[:, 0])
