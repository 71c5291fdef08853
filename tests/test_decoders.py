"""Both decoders: rotary frequencies (F3), which layer sees what, and documents that do not leak into one another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drafts import KINDS, random_draft, recipe

from configs.load import ConfigError
from configs.schema import Loss, Yarn
from train.batch import Batch, Sample, lay_out
from train.contract import DraftContract
from train.decode import DraftCache
from train.rope import frequencies, rotate, softmax_scale
from train.step import run
from train.verifier import FrozenVerifier

K3 = Yarn(factor=32, original_max_position_embeddings=32768)


def test_f3_yarn():
    inverse = frequencies(64, 50000.0, K3)
    expected = {0: 1.0, 15: 6.2713013e-3, 16: 4.0782831e-3, 20: 6.4724292e-4, 26: 4.7526616e-6, 31: 8.7644129e-7}
    assert {pair: float(inverse[pair]) for pair in expected} == pytest.approx(expected, rel=1e-6)
    assert softmax_scale(192, K3) == pytest.approx(0.13086080, abs=1e-8) and softmax_scale(192) == pytest.approx(0.0721688, abs=1e-7)
    assert torch.equal(frequencies(64, 50000.0)[:16], inverse[:16])  # the quick pairs are left alone


def test_pairs():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])[None, None]
    inverse, position = torch.tensor([1.0, 0.5]), torch.tensor([2])
    cos, sin = (position * inverse).cos(), (position * inverse).sin()
    halves = [cos[0] - 3 * sin[0], 2 * cos[1] - 4 * sin[1], 3 * cos[0] + sin[0], 4 * cos[1] + 2 * sin[1]]
    neighbours = [cos[0] - 2 * sin[0], 2 * cos[0] + sin[0], 3 * cos[1] - 4 * sin[1], 4 * cos[1] + 3 * sin[1]]
    torch.testing.assert_close(rotate(x, position, inverse)[0, 0], torch.stack(halves))
    torch.testing.assert_close(rotate(x, position, inverse, interleaved=True)[0, 0], torch.stack(neighbours))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("full", [(False, None)] * 2),
        ("causal", [(True, None)] * 2),
        ("sliding", [(True, 6)] * 2),
        ("sliding_both_ways", [(False, 6)] * 2),
        ("mixed", [(True, 6), (False, None), (True, 6)]),
        ("mla", [(False, None)] * 2),
    ],
)
def test_what_is_left_open_is_decided_as_engines_do(tiny_verifier, tmp_path, kind, expected):
    spec = DraftContract.resolve(recipe(tmp_path, tiny_verifier("llama"), kind))
    assert [spec.reach(layer) for layer in range(spec.layers)] == expected


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ({"layer_types": ["sliding_attention"]}, "draft.layer_types has 1 entries for draft.layers = 2"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "draft.window and sliding layers"),
        ({"decoder": "mla"}, "draft.mla is missing"),
        ({"mla": KINDS["mla"]["mla"]}, "draft.mla is for draft.decoder = mla"),
        ({**KINDS["mla"], "window": 4}, "without window"),
        ({"gqa": {"haeds": 3}}, r"unknown key draft.gqa.haeds \(did you mean heads\?\)"),
        ({"mla": {"q_lora_rank": 3}}, "draft.mla.heads is missing"),
    ],
)
def test_decoders_that_cannot_be_are_refused_in_one_line(tiny_verifier, tmp_path, draft, says):
    with pytest.raises(ConfigError, match=says) as refusal:
        recipe(tmp_path, tiny_verifier("llama"), "full", **draft)
    assert "\n" not in str(refusal.value)


def documents(config, lengths):
    """Batches of the same documents, packed in one or one by one, with random states."""
    random = np.random.default_rng(0)
    samples = [
        Sample(row, random.integers(0, 900, length).astype(np.int32), np.r_[np.zeros(3), np.ones(length - 3)].astype(np.uint8))
        for row, length in enumerate(lengths)
    ]
    states = torch.randn(sum(lengths), 4, 64, generator=torch.Generator().manual_seed(0))
    packed = Batch(lay_out(samples, 0, 4, config), states, True)
    alone = [
        Batch(lay_out([sample], 0, 4, config), states[document.start : document.stop], True)
        for sample, document in zip(samples, packed.documents)
    ]
    return packed, alone


@pytest.mark.parametrize("kind", ["full", "mixed", "reduced", "mla"])
def test_packing_is_layout_only(tiny_verifier, tmp_path, kind):
    config = recipe(tmp_path, tiny_verifier("llama"), kind)
    draft = random_draft(DraftContract.resolve(config))
    frozen = FrozenVerifier.load(tiny_verifier("llama"), torch.float32, torch.device("cpu"), draft.kept)
    packed, alone = documents(config, [9, 23, 4, 14])
    loss = Loss(terms={"ce": 0.1, "l1": 0.9}, chunk_bytes=200_000)

    def evaluate(batches):
        draft.zero_grad()
        sums = [run(draft, frozen, batch, 4, loss, torch.device("cpu")) for batch in batches]
        sum(part.objective for part in sums).backward()
        return sum(part.counts for part in sums), [parameter.grad.clone() for parameter in draft.parameters()]

    together, separate = evaluate([packed]), evaluate(alone)
    torch.testing.assert_close(together[0], separate[0], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(together[1], separate[1]):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


@pytest.mark.parametrize("kind", ["full", "mla"])
def test_a_neighbour_in_the_buffer_changes_nothing(tiny_verifier, tmp_path, kind):
    """Loss and gradient of one document with and without garbage in the other documents' states."""
    config = recipe(tmp_path, tiny_verifier("llama"), kind)
    draft = random_draft(DraftContract.resolve(config))
    frozen = FrozenVerifier.load(tiny_verifier("llama"), torch.float32, torch.device("cpu"))
    packed, _ = documents(config, [9, 23, 14])
    middle = packed.documents[1]
    packed.documents = [middle]
    results = []
    for garbage in (0.0, 1e4):
        packed.states[: middle.start] = garbage
        packed.states[middle.stop :] = -garbage
        draft.zero_grad()
        part = run(draft, frozen, packed, 4, Loss(), torch.device("cpu"))
        part.objective.backward()
        results.append((float(part.objective.detach()), draft.fc.weight.grad.clone()))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", ["mixed", "mla"])
def test_a_cache_filled_in_pieces_drafts_like_a_whole_context(tiny_verifier, tmp_path, kind):
    draft = random_draft(DraftContract.resolve(recipe(tmp_path, tiny_verifier("llama"), kind))).double()
    states = torch.randn(2, 13, 4, 64, generator=torch.Generator().manual_seed(0)).double()
    positions, rows, anchors = torch.arange(13).expand(2, -1), torch.arange(2), torch.tensor([[12], [7]])
    inputs = torch.randn(2, 1, 4, 64, generator=torch.Generator().manual_seed(1)).double()
    whole = draft.block(inputs, anchors, draft.context(states[:, :, :-1].flatten(2), positions))
    cache = DraftCache(draft, 2, 20, torch.device("cpu"))
    cache.layers = [tuple(part.double() for part in layer) for layer in cache.layers]
    for first, stop in ((0, 5), (3, 13)):  # three positions are written again, as after a rejection
        cache.write(rows, positions[:, first:stop], states[:, first:stop])
    torch.testing.assert_close(draft.block(inputs, anchors, cache.read(rows, 13)), whole, rtol=1e-4, atol=1e-5)
