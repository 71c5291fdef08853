"""What acceptance is measured on: files of prompts or of rollouts, and the public sets of the model cards by name."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from extract.render import between_ids, prompt_ids

REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
SPEED = "nvidia/SPEED-Bench"
# name: data set of the hub, its configuration, split, and the user's turns of a row (None: another row's)
PUBLIC = {
    "gsm8k": ("openai/gsm8k", "main", "test", lambda row: [row["question"] + REASON]),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"] + REASON]),
    "aime2026": ("MathArena/aime_2026", None, "train", lambda row: [row["problem"] + REASON]),
    "humaneval": ("openai/openai_humaneval", None, "test", lambda row: [CODE.format(row["prompt"])]),
    "mbpp": ("google-research-datasets/mbpp", "sanitized", "test", lambda row: [row["prompt"] + "\n" + "\n".join(row["test_list"])]),
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: row["prompt"]),
    "swe_bench_pro": ("ScaleAI/SWE-bench_Pro", None, "test", lambda row: [row["problem_statement"]]),
    **{
        f"speed_{name}": (SPEED, "qualitative", "test", lambda row, name=name: row["turns"] if row["category"] == name else None)
        for name in ("coding", "multilingual", "rag", "qa", "writing")
    },
    "speed_low_entropy": (SPEED, "throughput_16k", "test", lambda row: row["turns"] if row["category"] == "low_entropy" else None),
}


@dataclass
class Question:
    """One answer to measure. `prompt_ids` is known once the turns before it are answered; `response_ids` is what the verifier said
    without a draft, where a rollout tells."""

    id: str
    set: str
    conversation: str
    turn: int
    prompt_ids: list[int] | None
    response_ids: list[int] | None = None
    turns: list[str] = field(default_factory=list)  # the user's, up to this one
    messages: list[dict] = field(default_factory=list)  # of a rollout, as it was rendered

    @property
    def record(self) -> dict:
        return {"id": self.id, "set": self.set, "conversation": self.conversation, "turn": self.turn}


def read_sets(names: tuple[str, ...], limit: int | None, max_tokens: int) -> list[Question]:
    """Questions of files and public sets, at most `limit` conversations of each set. Raises ValueError naming file and line.

    A row is {"id", "turns": [user's texts]}, or a rollout {"id", "prompt_ids", "response_ids", …}. Its set is its "set", else its id
    without the number at the end, else the file's name.
    """
    if not names:
        raise ValueError(f"evaluate.sets is empty: name files of prompts or rollouts, or some of {', '.join(PUBLIC)}")
    questions: list[Question] = []
    for name in names:
        rows = _public(name) if name in PUBLIC else _lines(Path(name))
        found: dict[str, set[str]] = {}
        for where, row in rows:
            try:
                new = _questions(row, Path(name).stem, max_tokens)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{where}: neither prompt nor rollout ({type(error).__name__}: {error})") from None
            seen = found.setdefault(new[0].set, set())
            if limit is None or len(seen | {new[0].conversation}) <= limit:
                seen.add(new[0].conversation)
                questions += new
        if not found:
            raise ValueError(f"{name}: no prompts")
    return questions


def _lines(path: Path):
    if not path.exists():
        raise ValueError(f"{path}: no such file, and no public set (those are {', '.join(PUBLIC)})")
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error})") from None


def _public(name: str):
    from datasets import load_dataset

    path, config, split, turns = PUBLIC[name]
    try:
        rows = load_dataset(path, config, split=split)
    except Exception as error:  # the hub's client has many ways to say that it cannot be reached
        raise ValueError(f"{name}: {path} cannot be loaded from the hub ({' '.join(str(error).split())[:200]})") from None
    for number, row in enumerate(rows):
        if texts := turns(row):
            yield f"{name} row {number}", {"id": f"{name}-{number:04d}", "set": name, "turns": texts}


def _questions(row: dict, file: str, max_tokens: int) -> list[Question]:
    identity = str(row["id"])
    numbered = re.fullmatch(r"(\D.*?)[-_]?\d+(/\d+)?", identity)
    name = row.get("set") or (numbered.group(1) if numbered else file)
    if "turns" in row:
        ids = [identity, *(f"{identity}/{turn}" for turn in range(2, len(row["turns"]) + 1))]
        return [Question(key, name, identity, turn, None, None, row["turns"][:turn]) for turn, key in enumerate(ids, 1)]
    messages = row.get("messages") or []
    turn = sum(message["role"] == "user" for message in messages) or 1
    conversation = identity.removesuffix(f"/{turn}")
    return [Question(identity, name, conversation, turn, row["prompt_ids"], row["response_ids"][:max_tokens], messages=messages)]


def answer_all(what: str, questions: list[Question], tokenizer, batch: int, answer: Callable[[list[list[int]]], list]) -> list:
    """Results of all questions, in their order: turn after turn, `batch` at a time. `answer` gives results with `response_ids`.

    Prompts of later turns are rendered by the verifier's template as their turn comes. Raises RenderError."""
    started, results, answered = time.monotonic(), {}, {}
    for turn in sorted({question.turn for question in questions}):
        todo = [question for question in questions if question.turn == turn]
        for question in todo:
            if question.prompt_ids is None:
                question.prompt_ids = _prompt_ids(tokenizer, question, answered.get((question.conversation, turn - 1)))
        for first in range(0, len(todo), batch):
            part = todo[first : first + batch]
            for question, result in zip(part, answer([question.prompt_ids for question in part]), strict=True):
                results[question.id] = result
                answered[question.conversation, turn] = replace(question, response_ids=result.response_ids)
            print(f"{what}: {len(results)}/{len(questions)} answers, {time.monotonic() - started:.0f} s", flush=True)
    return [results[question.id] for question in questions]


def _prompt_ids(tokenizer, question: Question, before: Question | None) -> list[int]:
    users = [{"role": "user", "content": text} for text in question.turns]
    if question.turn == 1:
        return prompt_ids(tokenizer, users)
    ids = before.prompt_ids + before.response_ids
    return ids + between_ids(tokenizer, users[:1], users[-1], ids[-1])
