"""Diagnosis of a good draft, untouched and spoilt in one way each: what is wrong is named, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from in_process import InProcessPool, greedy
from tiny import write_recipe

from configs.load import load
from extract.hf import HFVerifier
from extract.render import load_tokenizer, prompt_ids, template_hash
from store.contract import DataContract
from train import loop
from train.checkpoint import latest, load_draft
from train.diagnose import diagnose
from train.sets import read_sets

OTHER_TEMPLATE = "{% for m in messages %}{{ m.role }} says: {{ m.content }} {% endfor %}{% if add_generation_prompt %}so: {% endif %}"
WORDS = "how can one say what the sun and the sea do when a day is over and all is said"


@pytest.fixture(scope="module")
def good(tiny_verifier, tmp_path_factory):
    """A recipe whose draft has learned its data, and the rollouts of that data."""
    folder = tmp_path_factory.mktemp("diagnose")
    train = {"max_steps": 160, "epochs": 99, "global_batch": 6, "optimizer": "adamw", "lr": 5e-3, "num_anchors": 24, "log_every": 40}
    train |= {"markov_lr_scale": 0.01}  # what follows must be learned from the taps
    store = {"path": str(folder / "store"), "bytes": 16_000_000, "keep": True, "cache_path": str(folder / "cache")}
    sections = {"train": train, "store": store, "evaluate": {"sets": [str(folder / "rollouts.jsonl")]}}
    config = load(write_recipe(folder, tiny_verifier("llama"), sections | {"draft": {"taps": [1, 2], "layers": 1}}))
    verifier, tokenizer = HFVerifier(config.verifier.path, "float32", config.draft.taps), load_tokenizer(config.verifier)
    random, rows, rollouts = np.random.default_rng(0), [], []
    for index in range(12):
        message = {"role": "user", "content": " ".join(random.choice(WORDS.split(), 6))}
        prompt = prompt_ids(tokenizer, [message])
        answer = greedy(verifier, prompt, 24)
        mask = [0] * len(prompt) + [1] * len(answer)
        rows.append({"input_ids": np.array(prompt + answer, np.int32), "loss_mask": np.array(mask, np.uint8), "id": str(index)})
        messages = [message, {"role": "assistant", "content": tokenizer.decode(answer)}]
        rollouts.append({"id": f"p-{index}", "prompt_ids": prompt, "response_ids": answer, "messages": messages})
    Dataset.from_list(rows).save_to_disk(str(config.data.path))
    contract = DataContract(tokenizer="t", template=template_hash(tokenizer), length=400, seed=0, filters={})
    (config.data.path / "data_contract.json").write_text(contract.model_dump_json())
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Pool", lambda config: InProcessPool(config))
        loop.train(config)
    return config


def findings(config, spoil=lambda draft: None, **keys) -> tuple[list[str], list[str]]:
    draft = load_draft(latest(config.run_dir / "checkpoints")).eval()
    spoil(draft)
    found = diagnose(config, draft, read_sets(config.evaluate.sets, None, 128))
    print(json.dumps(found, indent=1))
    return found["faults"], found["limits"]


def test_no_false_alarm(good):
    assert findings(good) == ([], [])


@pytest.mark.parametrize("taps", [(0, 1), (2, 3), (2, 1)])
def test_shifted_taps_are_named(good, taps):
    def shift(draft):
        draft.spec = draft.spec.model_copy(update={"taps": taps})

    faults, _ = findings(good.model_copy(update={"draft": good.draft.model_copy(update={"taps": taps})}), shift)
    assert faults == ["taps"]


def test_another_mask_token_is_named(good):
    def spoil(draft):
        draft.spec = draft.spec.model_copy(update={"mask_token_id": 7})

    assert findings(good, spoil)[0] == ["mask token"]  # other readings of such blocks look better too, until it is read rightly


def test_another_template_is_named(good, tmp_path):
    folder = tmp_path / "verifier"
    shutil.copytree(good.verifier.path, folder)
    tokenizer = load_tokenizer(good.verifier)
    tokenizer.chat_template = OTHER_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = good.model_copy(update={"verifier": good.verifier.model_copy(update={"path": str(folder)})})
    verifier, tokenizer, rollouts = HFVerifier(str(folder), "float32", good.draft.taps), load_tokenizer(config.verifier), []
    for line in Path(good.evaluate.sets[0]).read_text().splitlines():
        row = json.loads(line)
        prompt = prompt_ids(tokenizer, row["messages"][:-1])
        rollouts.append(row | {"prompt_ids": prompt, "response_ids": greedy(verifier, prompt, 24)})
        assert prompt != row["prompt_ids"]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    evaluated = good.evaluate.model_copy(update={"sets": (str(tmp_path / "rollouts.jsonl"),)})
    assert findings(config.model_copy(update={"evaluate": evaluated}))[0] == ["chat template"]
    assert findings(good.model_copy(update={"evaluate": evaluated}))[0] == ["chat template"]


def test_off_policy_rows_are_named(good, tmp_path):
    rows, random = list(map(json.loads, Path(good.evaluate.sets[0]).read_text().splitlines())), np.random.default_rng(0)
    for row in rows:
        row["response_ids"] = [int(random.integers(4, 900)) if random.random() < 0.3 else token for token in row["response_ids"]]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluated = good.evaluate.model_copy(update={"sets": (str(tmp_path / "rollouts.jsonl"),)})
    assert findings(good.model_copy(update={"evaluate": evaluated}))[0] == ["off-policy evaluated text"]
