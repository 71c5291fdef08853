"""The published speculators package reads our exports and computes our logits."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
from drafts import recipe, save_checkpoint

from train.checkpoint import load_draft
from train.draft import slot_positions
from train.export import export
from train.verifier import FrozenVerifier


@pytest.fixture(scope="module")
def speculators(tmp_path_factory):
    """The package alone, without the versions of others that it asks for. (What it imports besides comes with vLLM.)"""
    pytest.importorskip("openai")
    target = tmp_path_factory.mktemp("speculators")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
    command += ["speculators==0.9.0", "hs-connectors==0.9.0"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"speculators cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(target))
        yield importlib.import_module("speculators")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "draft"),
    [("full", {}), ("sliding", {"window": 64}), ("reduced", {})],  # its windows count from the anchor: this one reaches everything
)
def test_speculators_computes_our_logits(speculators, tiny_verifier, tmp_path, kind, draft):
    path = tiny_verifier("llama")
    checkpoint = save_checkpoint(recipe(tmp_path, path, kind, **draft))
    export(checkpoint, tmp_path / "export", "speculators", torch.float32)
    ours = load_draft(checkpoint)
    frozen = FrozenVerifier.load(path, torch.float32, torch.device("cpu"), ours.kept)
    generator, length, anchors = torch.Generator().manual_seed(0), 40, torch.tensor([1, 17, 30])
    tokens = torch.randint(4, 1000, (length,), generator=generator)
    states = torch.randn(length, 4, 64, generator=generator)
    taps = states[:, :-1].flatten(1) * ours.tap_scale
    at = slot_positions(anchors, ours.spec.block_size)
    with torch.no_grad():
        slots = frozen.slot_embeddings(tokens[anchors], ours.spec.mask_token_id, ours.spec.block_size)
        hidden = ours.block(slots[None], anchors[None], ours.context(taps[None], torch.arange(length)[None]))[0]
        expected = frozen.heads.draft_logits(hidden) + ours.markov_head.markov_w2(ours.markov_head.markov_w1(tokens[at]))

        theirs = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "export"), attn_implementation="eager").eval()
        theirs.load_verifier_weights()
        eligible = torch.zeros(1, length).index_fill(1, anchors, 1)
        documents = torch.zeros(1, length, dtype=torch.long)
        made = theirs._backbone_forward(taps[None], tokens[None], eligible, states[None, :, -1], documents, max_anchors=len(anchors))
        logits = made[1].view(*expected.shape) + theirs.markov_head.block_bias(prev_token_ids=tokens[at], hidden_states=hidden)
    assert (logits - expected).norm() <= 1e-4 * expected.norm()
    if kind == "full":  # a reduced vocabulary has another verifier's head there
        teacher = frozen.logits(states[at, -1])
        assert (made[2].view(*teacher.shape) - teacher).norm() <= 1e-4 * teacher.norm()
