"""How a measurement was made: the record that travels with it, so that unlike things are not put into one ratio unseen."""

from __future__ import annotations

import hashlib
import json
import platform

import torch
import transformers

from configs.schema import Config
from extract.render import template_hash, tokenizer_hash
from store.verifier import fingerprint
from train.checkpoint import _code_version
from train.contract import DraftContract
from train.counters import engine_version
from train.sets import Question


def protocol(config: Config, spec: DraftContract, questions: list[Question], tokenizer) -> dict:
    """Everything but the draft's weights that the numbers depend on; all values are strings, numbers or None."""
    settings = config.evaluate
    prompts = json.dumps([[question.id, question.prompt_ids] for question in questions])
    return {
        "draft": spec.digest(),
        "engine": engine_version(settings.engine) if settings.engine else f"transformers {transformers.__version__}",
        "readings": ", ".join([*settings.readings, *(["engine"] if settings.engine else [])]),
        "verifier": fingerprint(config.verifier.path),
        "verifier dtype": config.verifier.dtype,
        "acceptance rule": settings.rule,
        "temperature": 0.0 if settings.rule == "greedy" else settings.temperature,
        "drafts a forward": spec.block_size,
        "max_tokens": settings.max_tokens,
        "longest prompt and answer": max(len(question.prompt_ids) + len(question.response_ids) for question in questions),
        "answers": len(questions),
        "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:16],
        "tokenizer": tokenizer_hash(tokenizer),
        "template": template_hash(tokenizer),
        "decoded together": settings.concurrency if settings.engine else settings.batch_size,
        "taps": ", ".join(map(str, spec.taps)),
        "seed": config.seed,
        "software": f"dspark-pipeline {_code_version()}, torch {torch.__version__}, Python {platform.python_version()}",
    }


def differences(ours: dict, theirs: dict) -> list[str]:
    """What two protocols do not share; what a draft is and which taps it reads is its own affair."""
    keys = [key for key in {**ours, **theirs} if key not in ("draft", "taps")]
    return [f"{key}: {ours.get(key)} here, {theirs.get(key)} there" for key in keys if ours.get(key) != theirs.get(key)]
