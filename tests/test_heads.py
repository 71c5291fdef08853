"""The objective where it is hard: a reduced vocabulary, a draft that nearly equals its teacher, bf16; and the verifier's head."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from configs.schema import Loss
from train.heads import Heads
from train.objective import BYTES_PER_LOGIT, Slots, slot_terms
from train.verifier import FrozenVerifier

TERMS = {"ce": 0.1, "ce_argmax": 0.2, "tv": 0.5, "l1": 0.7}


def pieces(seed=0, count=33, vocabulary=50, hidden=9, rows=12, rank=4):
    torch.manual_seed(seed)
    draft, head = torch.randn(count, hidden), torch.randn(vocabulary, hidden)
    teacher = torch.randn(rows, hidden)
    markov = torch.randn(vocabulary, rank), torch.randn(vocabulary, rank)
    previous, labels = torch.randint(vocabulary, (2, count))
    return draft, head, teacher, markov, previous, labels, torch.rand(count), torch.randint(rows, (count,))


def oracle(hidden, w1, w2, heads: Heads, teacher, previous, labels, weights, rows, terms):
    """Everything in fp64 and in autograd's graph, straight from the definitions."""
    head = heads.verifier.double()
    kept = torch.arange(len(head)) if heads.kept is None else heads.kept
    logits = teacher.double() @ head.mT * heads.scale
    if heads.softcap:
        logits = heads.softcap * torch.tanh(logits / heads.softcap)
    full = logits.softmax(-1)[rows]
    p = (hidden @ head[kept].mT + w1[previous] @ w2.mT).softmax(-1)
    missing = 1 - full[:, kept].sum(-1)  # the teacher's probability of what the draft cannot say

    def entropy(target):
        where = (kept == target[:, None]).double()
        return -(where * p.log()).sum(-1)  # nothing where the draft does not have the token

    values = {"ce": entropy(labels), "ce_argmax": entropy(full.argmax(-1))}
    values["l1"] = (p - full[:, kept]).abs().sum(-1) + missing
    values["tv"] = values["l1"] / 2
    accepted = kept[p.argmax(-1)] == full.argmax(-1)
    return sum(alpha * (weights.double() * values[name]).sum() for name, alpha in terms.items()), values, accepted


def compare(heads, draft, teacher, markov, previous, labels, weights, rows, terms=TERMS, rtol=1e-9, atol=1e-10):
    ours = [tensor.clone().requires_grad_() for tensor in (draft, *markov)]
    exact = [tensor.double().clone().requires_grad_() for tensor in (draft, *markov)]
    expected, values, accepted = oracle(*exact, heads, teacher, previous, labels, weights, rows, terms)
    loss = Loss(terms=terms, chunk_bytes=BYTES_PER_LOGIT * 7 * len(heads.verifier))
    slots = Slots(ours[0], ours[1][previous], labels, weights, teacher, rows)
    result = slot_terms(slots, ours[2], heads, loss)
    expected.backward()
    result.weighted_sum.backward()
    torch.testing.assert_close(result.weighted_sum.double(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(result.tv.double(), values["tv"], rtol=rtol, atol=atol)
    torch.testing.assert_close(result.ce.double(), values["ce"], rtol=rtol, atol=atol)
    for mine, reference in zip(ours, exact):
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=rtol, atol=atol * 10)
    return result, accepted


@pytest.mark.parametrize("seed", range(3))
def test_a_reduced_vocabulary_keeps_the_teachers_normaliser(seed):
    draft, head, teacher, (w1, w2), previous, labels, weights, rows = pieces(seed)
    kept = torch.randperm(50)[:20].sort().values
    double = [tensor.double() for tensor in (draft, teacher, w1, w2[kept], weights)]
    heads = Heads(head.double(), kept=kept)
    result, accepted = compare(heads, double[0], double[1], (double[2], double[3]), previous, labels, double[4], rows)
    assert torch.equal(result.accepted, accepted) and 0 < int(accepted.sum()) < len(accepted)
    outside = ~torch.isin(labels, kept)
    assert outside.any() and (result.ce[outside] == 0).all()


def test_the_teachers_mass_outside_counts_as_distance():
    """A draft that equals the renormalised teacher still loses what it cannot say: tv = 1 - kept mass, and no gradient is left."""
    teacher = torch.tensor([[2.0, 1.0, 0.5, -1.0]]).double()
    kept = torch.tensor([0, 2])
    hidden = teacher.clone().requires_grad_()
    zero = torch.zeros(4, 1).double()
    slots = Slots(hidden, zero[:1], torch.tensor([1]), torch.ones(1).double(), teacher, torch.tensor([0]))
    result = slot_terms(slots, zero[kept], Heads(torch.eye(4).double(), kept=kept), Loss(terms={"l1": 1.0}))
    assert float(result.tv) == pytest.approx(float(1 - teacher.softmax(-1)[0, kept].sum()), abs=1e-12)
    result.weighted_sum.backward()
    assert hidden.grad.abs().max() < 1e-12


def test_scale_and_soft_cap_are_the_teachers():
    draft, head, teacher, (w1, w2), previous, labels, weights, rows = pieces(1)
    heads = Heads(head.double(), scale=0.25, softcap=1.5)
    double = [tensor.double() for tensor in (draft, teacher, w1, w2, weights)]
    compare(heads, double[0], double[1], (double[2], double[3]), previous, labels, double[4], rows)


@pytest.mark.parametrize("distance", [1e-1, 1e-2, 1e-3])
def test_a_draft_close_to_its_teacher_in_fp32(distance):
    draft, head, teacher, (w1, w2), previous, labels, weights, rows = pieces(2)
    close = teacher[rows] + distance * draft
    terms = {"tv": 0.5, "l1": 0.7}
    compare(Heads(head), close, teacher, (w1, w2 * 0), previous, labels, weights, rows, terms, rtol=1e-4, atol=1e-5)


def test_a_draft_that_equals_its_teacher_in_fp32_has_no_gradient():
    _, head, teacher, (w1, w2), previous, labels, weights, rows = pieces(3)
    hidden = teacher[rows].clone().requires_grad_()
    slots = Slots(hidden, w1[previous], labels, weights, teacher, rows)
    result = slot_terms(slots, w2 * 0, Heads(head), Loss(terms={"l1": 1.0}))
    result.weighted_sum.backward()
    assert result.tv.max() < 1e-6


def test_bf16_products_with_fp32_statistics():
    """bf16 head and bf16 hidden states: the error is that of bf16 logits, in value and gradient, and sums do not drift."""
    draft, head, teacher, (w1, w2), previous, labels, weights, rows = pieces(4, count=200, vocabulary=300, hidden=32)
    scaled = [(0.3 * tensor).bfloat16().float() for tensor in (draft, head, teacher, w1, w2)]
    draft, head, teacher, w1, w2 = scaled
    ours = [tensor.clone().requires_grad_() for tensor in (draft, w1, w2)]
    exact = [tensor.double().clone().requires_grad_() for tensor in (draft, w1, w2)]
    heads = Heads(head.bfloat16())
    expected, values, _ = oracle(*exact, Heads(head), teacher, previous, labels, weights, rows, {"ce": 0.1, "l1": 0.9})
    slots = Slots(ours[0], ours[1][previous], labels, weights, teacher, rows)
    result = slot_terms(slots, ours[2], heads, Loss(terms={"ce": 0.1, "l1": 0.9}, chunk_bytes=100_000))
    expected.backward()
    result.weighted_sum.backward()
    assert result.ce.dtype == torch.float32 and ours[2].grad.dtype == torch.float32
    torch.testing.assert_close(result.weighted_sum.double(), expected, rtol=2e-3, atol=0)
    torch.testing.assert_close(result.tv.double(), values["tv"], rtol=0, atol=5e-3)
    for mine, reference in zip(ours, exact):
        assert float((mine.grad.double() - reference.grad).norm() / reference.grad.norm()) < 2e-2


VERIFIERS = {
    "llama": ({"rms_norm_eps": 1e-5}, lambda x, w: F.rms_norm(x, (8,), w, 1e-5), lambda z: z),
    "gemma2": (
        {"rms_norm_eps": 1e-6, "final_logit_softcapping": 3.0},
        lambda x, w: F.rms_norm(x, (8,), w + 1, 1e-6),
        lambda z: 3 * torch.tanh(z / 3),
    ),
    "cohere": ({"layer_norm_eps": 1e-4, "logit_scale": 0.25}, lambda x, w: F.layer_norm(x, (8,), w, None, 1e-4), lambda z: z / 4),
    "granite": ({"rms_norm_eps": 1e-3, "logits_scaling": 8.0}, lambda x, w: F.rms_norm(x, (8,), w, 1e-3), lambda z: z / 8),
}


@pytest.mark.parametrize("family", VERIFIERS)
def test_the_verifiers_own_norm_and_logits(tmp_path, family):
    keys, norm, logits = VERIFIERS[family]
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(20, 8), "model.norm.weight": torch.randn(8)}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "tie_word_embeddings": True, **keys}))
    save_file(tensors, tmp_path / "model.safetensors")
    frozen = FrozenVerifier.load(str(tmp_path), torch.float32, torch.device("cpu"))
    last = torch.randn(3, 8) * 5
    expected = logits(norm(last, tensors["model.norm.weight"]) @ tensors["model.embed_tokens.weight"].mT)
    torch.testing.assert_close(frozen.logits(last), expected)
    torch.testing.assert_close(frozen.heads.draft_logits(last), last @ tensors["model.embed_tokens.weight"].mT)
