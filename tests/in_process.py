"""Training in the test's own process: a pool whose extractor is a tiny verifier right here, and data sets of its rollouts."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset

from configs.schema import Config
from extract.hf import HFVerifier
from extract.pool import ExtractionError
from store.contract import DataContract
from store.objects import open_store
from store.sample import put_sample


class InProcessPool:
    """`extract.pool.Pool` without a server between. `distort` may change states before they are put."""

    def __init__(self, config: Config, distort=lambda states: states, bad: tuple[tuple[int, ...], ...] = ()):
        self.verifier = HFVerifier(config.verifier.path, config.verifier.dtype, config.draft.taps)
        self.store, self.distort, self.bad = open_store(config.store), distort, bad
        self.claims: dict = {}  # fields of the contract to lie about
        self.asked, self.lock = 0, threading.Lock()

    def make(self, name: str, token_ids: list[int]) -> None:
        self.asked += 1
        if tuple(token_ids) in self.bad:
            raise ExtractionError("non_finite", f"{name}: a state is not finite")
        with self.lock:
            states = self.distort(self.verifier.prefill([token_ids])[0]).contiguous()
        put_sample(self.store, name, self.contract(), token_ids, states)

    def complete(self, token_ids: list[int], max_tokens: int, temperature: float = 0.0, seed: int | None = None):
        response = greedy(self.verifier, token_ids, max_tokens)
        return response, "stop" if response[-1] in self.verifier.stop_ids else "length"

    def contract(self):
        return self.verifier.contract.model_copy(update=self.claims)


def greedy(verifier: HFVerifier, prompt: list[int], count: int) -> list[int]:
    """The verifier's own continuation, one token a forward."""
    slots, row = verifier.slots(1, len(prompt) + count), torch.tensor([0])
    logits, _ = verifier.step(torch.tensor([prompt]), slots, row)
    response = [int(logits[0, -1].argmax())]
    while len(response) < count and response[-1] not in verifier.stop_ids:
        logits, _ = verifier.step(torch.tensor([[response[-1]]]), slots, row)
        response.append(int(logits[0, -1].argmax()))
    return response


def save_data(config: Config, verifier: HFVerifier, samples: int, response: int = 24) -> Path:
    """A data set of rollouts of random prompts of different lengths, and the rollouts file beside it."""
    random = np.random.default_rng(0)
    rows, rollouts = [], []
    for index in range(samples):
        prompt = random.integers(4, verifier.vocab_size - 1, size=int(random.integers(3, 12))).tolist()
        answer = greedy(verifier, prompt, response)
        mask = [0] * len(prompt) + [1] * len(answer)
        rows.append({"input_ids": np.array(prompt + answer, np.int32), "loss_mask": np.array(mask, np.uint8), "id": str(index)})
        rollouts.append({"id": str(index), "prompt_ids": prompt, "response_ids": answer, "finish_reason": "length"})
    Dataset.from_list(rows).save_to_disk(str(config.data.path))
    contract = DataContract(tokenizer="t", template="t", length=config.data.length, seed=0, filters={})
    (config.data.path / "data_contract.json").write_text(contract.model_dump_json())
    path = config.data.path.with_name("rollouts.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    return path
