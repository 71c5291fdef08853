"""The objective against its fixture (F2), a plain autograd oracle in fp64, and itself under other chunkings."""

from __future__ import annotations

import pytest
import torch
from plain import plain_terms

from configs.schema import Loss
from train.heads import Heads
from train.objective import BYTES_PER_LOGIT, Slots, confidence_sum, normaliser, slot_terms, slot_weights


def one_hot_head(logits, teacher, labels, terms, weights=None):
    """slot_terms on given logits: the head is the identity and the Markov bias zero."""
    count, vocabulary = logits.shape
    weights = torch.ones(count).double() if weights is None else weights
    slots = Slots(logits, torch.zeros(count, 1).double(), labels, weights, teacher, torch.arange(count))
    return slot_terms(slots, torch.zeros(vocabulary, 1).double(), Heads(torch.eye(vocabulary).double()), Loss(terms=terms))


DRAFT = torch.tensor([[2.0, 1, 0, -1], [0, 0, 0, 0]]).double()
TEACHER = torch.tensor([[1.0, 2, 0, 0], [3, 0, 0, 0]]).double()


def test_f2_terms():
    result = one_hot_head(DRAFT, TEACHER, torch.tensor([1, 0]), {"ce": 1.0})
    assert result.ce.tolist() == pytest.approx([1.4401897, 1.3862944], abs=1e-7)
    assert (1 - result.tv).tolist() == pytest.approx([0.5760512, 0.3799515], abs=1e-7)
    logits, weight = torch.tensor([0.5, -0.5]).double(), torch.ones(1).double()
    for slot, expected in enumerate((0.6860514, 0.6640527)):
        assert float(confidence_sum(logits[[slot]], 1 - result.tv[[slot]], weight)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("terms", "denominator", "expected"),
    [
        ({"ce": 0.1, "l1": 0.9}, "weighted", 1.7357297),
        ({"ce": 0.1, "tv": 0.9}, "weighted", 1.2769044),
        ({"ce": 0.1, "tv": 0.9}, "slots", 1.1356793),
    ],
)
def test_f2_totals(terms, denominator, expected):
    weights = slot_weights(2, 4.0).double()
    result = one_hot_head(DRAFT, TEACHER, torch.tensor([1, 0]), terms, weights)
    confidence = confidence_sum(torch.tensor([0.5, -0.5]).double(), 1 - result.tv, weights)
    assert float((result.weighted_sum + confidence) / normaliser(weights, denominator)) == pytest.approx(expected, abs=1e-6)


def test_f2_gradient_of_tv():
    logits = DRAFT.clone().requires_grad_()
    one_hot_head(logits, TEACHER, torch.tensor([1, 0]), {"tv": 1.0}).weighted_sum.backward()
    assert logits.grad[0].tolist() == pytest.approx([0.1731752, -0.1731752, 0.0234367, -0.0234367], abs=1e-7)
    assert logits.grad[1].tolist() == pytest.approx([-0.1875, 0.0625, 0.0625, 0.0625], abs=1e-7)


def test_label_and_argmax_are_different_targets():
    """Teacher argmax is token 1 (q = e^2 / (e + e^2 + 2)), the data says token 2: `ce` and `ce_argmax` must not be mixed up."""
    by_data = one_hot_head(DRAFT[:1], TEACHER[:1], torch.tensor([2]), {"ce": 1.0})
    by_argmax = one_hot_head(DRAFT[:1], TEACHER[:1], torch.tensor([2]), {"ce_argmax": 1.0})
    log_normaliser = torch.tensor([2.0, 1, 0, -1]).double().logsumexp(0)
    assert float(by_data.weighted_sum) == pytest.approx(float(log_normaliser - 0), abs=1e-12)
    assert float(by_argmax.weighted_sum) == pytest.approx(float(log_normaliser - 1), abs=1e-12)
    assert by_data.accepted.tolist() == [False]
    hit = one_hot_head(TEACHER[:1], TEACHER[:1], torch.tensor([2]), {"ce": 1.0})
    assert hit.accepted.tolist() == [True]


def random_slots(seed: int, count=37, vocabulary=60, hidden=9, rows=11, rank=4):
    torch.manual_seed(seed)
    parameters = [torch.randn(*shape).double() for shape in ((count, hidden), (vocabulary, rank), (vocabulary, rank))]
    head, teacher = torch.randn(vocabulary, hidden).double(), torch.randn(rows, hidden).double()
    previous, labels = torch.randint(vocabulary, (2, count))
    return parameters, head, teacher, previous, labels, torch.rand(count).double(), torch.randint(rows, (count,))


@pytest.mark.parametrize(
    "terms", [{"ce": 0.3}, {"ce_argmax": 0.3}, {"tv": 0.5}, {"l1": 0.7}, {"ce": 0.1, "ce_argmax": 0.2, "tv": 0.5, "l1": 0.7}]
)
@pytest.mark.parametrize("slots_a_chunk", [1, 5, 1000])
def test_value_and_gradient_equal_autograd(terms, slots_a_chunk):
    parameters, head, teacher, previous, labels, weights, rows = random_slots(0)
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in parameters] for _ in range(2))
    values = plain_terms(*theirs, head, teacher, rows, previous, labels)
    expected = sum(alpha * (weights * values[name]).sum() for name, alpha in terms.items())
    (3 * expected).backward()
    loss = Loss(terms=terms, chunk_bytes=slots_a_chunk * BYTES_PER_LOGIT * len(head))
    slots = Slots(ours[0], ours[1][previous], labels, weights, teacher, rows)
    result = slot_terms(slots, ours[2], Heads(head), loss)
    (3 * result.weighted_sum).backward()
    torch.testing.assert_close(result.weighted_sum, expected, rtol=1e-12, atol=1e-12)
    for mine, reference in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-9, atol=1e-12)


def test_a_draft_that_equals_its_teacher_has_no_distance_and_no_distribution_gradient():
    logits = TEACHER.clone().requires_grad_()
    result = one_hot_head(logits, TEACHER, torch.tensor([1, 0]), {"l1": 1.0})
    result.weighted_sum.backward()
    assert result.tv.abs().max() < 1e-12 and logits.grad.abs().max() < 1e-12


def test_results_come_back_in_the_order_of_the_slots():
    parameters, head, teacher, previous, labels, weights, rows = random_slots(1)
    loss = Loss(terms={"ce": 1.0}, chunk_bytes=3 * BYTES_PER_LOGIT * len(head))
    shuffled = torch.randperm(len(rows))
    embedding = parameters[1][previous]
    slots = Slots(parameters[0], embedding, labels, weights, teacher, rows)
    moved = Slots(parameters[0][shuffled], embedding[shuffled], labels[shuffled], weights[shuffled], teacher, rows[shuffled])
    whole, part = (slot_terms(order, parameters[2], Heads(head), loss) for order in (slots, moved))
    for field in ("ce", "tv", "accepted"):
        torch.testing.assert_close(getattr(whole, field)[shuffled], getattr(part, field))
