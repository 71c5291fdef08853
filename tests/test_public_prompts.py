"""The real verifier in float64 on public prompts: the closed loop says exactly what greedy decoding says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drafts import random_draft

from configs.load import load
from extract.hf import HFVerifier
from extract.render import load_tokenizer, prompt_ids
from train.bigram import bigram_counts, bigram_factors
from train.contract import DraftContract
from train.decode import speculate
from train.verifier import FrozenVerifier

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = ROOT.parent / "shared" / "data"  # lies beside the project, not in it
COUNT, TOKENS = 24, 16


@pytest.mark.integration
def test_greedy_loop_is_greedy_decoding():
    config = load(ROOT / "configs" / "smollm2_embedded.yaml", ["draft.block_size=4"])  # a forward of float64 costs by its tokens
    path = ROOT / config.verifier.path
    subprocess.run([sys.executable, "-m", "extract.smollm2", str(path)], check=True)
    files = sorted(PUBLIC.glob("prompts_*.jsonl")) or [ROOT / "configs" / "demo_prompts.jsonl"]
    short = [sorted(file.read_text().splitlines(), key=len)[: COUNT // len(files)] for file in files]
    lines = [json.loads(line)["turns"][0] for rows in short for line in rows]
    tokenizer = load_tokenizer(config.verifier.model_copy(update={"path": str(path)}))
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in lines]
    verifier = HFVerifier(str(path), "float64", config.draft.taps)
    facts = config.model_copy(update={"verifier": config.verifier.model_copy(update={"path": str(path)})})
    draft = random_draft(DraftContract.resolve(facts))
    rows = [{"input_ids": torch.tensor(prompt).numpy(), "loss_mask": torch.ones(len(prompt)).numpy()} for prompt in prompts]
    first, second = bigram_factors(bigram_counts(rows, verifier.vocab_size), draft.spec.markov_rank)
    draft.markov_head.markov_w1.weight.data.copy_(first)
    draft.markov_head.markov_w2.weight.data.copy_(3 * second[draft.kept])
    draft.norm.weight.data.mul_(0.05)
    results = speculate(verifier, draft, FrozenVerifier.load(str(path), torch.float32, torch.device("cpu"), draft.kept), prompts, TOKENS)
    assert len(results) == COUNT and sum(map(sum, (result.accepted for result in results))) > 0
    slots = verifier.slots(COUNT, max(map(len, prompts)) + TOKENS)
    for row, (prompt, result) in enumerate(zip(prompts, results)):
        text = prompt + result.response_ids
        logits, _ = verifier.step(torch.tensor([text[:-1]]), slots, torch.tensor([row]))
        assert logits[0, len(prompt) - 1 :].argmax(-1).tolist() == result.response_ids
        assert len(result.response_ids) == TOKENS or result.response_ids[-1] in verifier.stop_ids
