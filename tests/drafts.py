"""Small random drafts of every kind, and checkpoints of them."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import write_recipe

from configs.load import load
from train import checkpoint
from train.contract import DraftContract
from train.draft import Draft

MLA = {
    "heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rope_theta": 5000.0,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}
KINDS = {
    "full": {},
    "causal": {"causal": True},
    "sliding": {"window": 6},
    "sliding_both_ways": {"window": 6, "causal": False},
    "mixed": {"window": 6, "layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "reduced": {"draft_vocab_size": 100},
    "mla": {"decoder": "mla", "mla": MLA},
    "mla_without_yarn": {"decoder": "mla", "mla": MLA | {"yarn": None}},
}


def recipe(folder: Path, verifier: Path, kind: str, **draft):
    return load(write_recipe(folder, verifier, {"draft": {"layers": 2, **KINDS[kind], **draft}}))


@torch.no_grad()
def random_draft(spec: DraftContract, seed: int = 0) -> Draft:
    """Every tensor random: norms away from 1, taps of different scales, a vocabulary with gaps."""
    generator, draft = torch.Generator().manual_seed(seed), Draft(spec)
    for name, parameter in draft.named_parameters():
        spread = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + ("norm" in name))
    draft.tap_scale.copy_(torch.rand(draft.tap_scale.shape, generator=generator) * 5 + 0.2)
    if spec.reduced:
        draft.kept.copy_(torch.randperm(spec.vocab_size, generator=generator)[: spec.draft_vocab_size].sort().values)
    return draft


def save_checkpoint(config, seed: int = 0) -> Path:
    """A checkpoint of a random draft as the recipe means it."""
    spec = DraftContract.resolve(config)
    return checkpoint.save(config.run_dir / "checkpoints", 1, random_draft(spec, seed).state_dict(), [], {"draft": spec}, config)
