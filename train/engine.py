"""A served engine's own counters of acceptance, differenced around what it is asked: vLLM's Prometheus text, ATOM's mtp_stats."""

from __future__ import annotations

import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import httpx

from configs.schema import Config
from train.sets import Question, continue_conversation

VLLM = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens_per_pos)_total\{([^}]*)\} (\S+)$", re.MULTILINE)
SETTLED_S = 0.3  # counters follow the answer that they count


class EngineError(Exception):
    """A served engine that does not answer, or counts nothing; the message is one line."""


@dataclass
class Answer:
    response_ids: list[int]


def read_counters(metrics: str | None = None, mtp_stats: dict | None = None) -> Counter:
    """Cumulative "forwards" that verified drafts and "at_least/k" of them that accepted k, from either engine's words.

    Raises EngineError where nothing is counted.
    """
    counts: Counter = Counter()
    if metrics is not None:
        for labels, value in VLLM.findall(metrics):
            position = re.search(r'position="(\d+)"', labels)
            counts["forwards" if position is None else f"at_least/{int(position.group(1)) + 1}"] += float(value)
    elif mtp_stats and mtp_stats.get("enabled"):
        for accepted, forwards in mtp_stats.get("distribution", {}).items():
            counts["forwards"] += forwards
            counts.update({f"at_least/{k}": forwards for k in range(1, int(accepted) + 1)})
        counts["forwards"] += 0
    if "forwards" not in counts:
        raise EngineError("the engine counts no drafts: speculative decoding is off, or its statistics are")
    return counts


def ask_engine(config: Config, questions: list[Question], tokenizer, block: int) -> list[dict]:
    """Records (`train.statistics`) of the engine at `evaluate.engine`: one an answer where `evaluate.concurrency` is 1, else one a set and
    turn. Tokens are what it answered after the first one of each. Raises EngineError."""
    settings, records, answered = config.evaluate, [], {}
    url = settings.engine.rstrip("/")
    with httpx.Client(timeout=config.pool.deadline_s, trust_env=False) as client, ThreadPoolExecutor(settings.concurrency) as threads:

        def ask(question: Question) -> list[int]:
            body = {"prompt": question.prompt_ids, "max_tokens": settings.max_tokens, "return_token_ids": True, "seed": config.seed}
            body |= {"model": _model(client, url), "temperature": 0.0 if settings.rule == "greedy" else settings.temperature}
            return _get(client, "POST", f"{url}/v1/completions", json=body).json()["choices"][0]["token_ids"]

        for (turn, name), group in groupby(sorted(questions, key=lambda q: (q.turn, q.set)), key=lambda q: (q.turn, q.set)):
            group = list(group)
            for question in group:
                if question.prompt_ids is None:
                    question.prompt_ids = continue_conversation(tokenizer, question, answered.get((question.conversation, turn - 1)))
            for unit in [[question] for question in group] if settings.concurrency == 1 else [group]:
                before = _counters(client, url)
                for question, response in zip(unit, threads.map(ask, unit), strict=True):
                    question.response_ids = response
                    answered[question.conversation, turn] = question
                counted = _counters(client, url)
                counted.subtract(before)
                sums = {"forwards": 0.0, **{f"at_least/{k}": 0.0 for k in range(1, block + 1)}} | counted
                sums["tokens"] = float(sum(len(question.response_ids) - 1 for question in unit))
                whole = {"id": f"{name}, turn {turn}", "set": name, "conversation": name, "turn": turn}
                records.append((unit[0].record if settings.concurrency == 1 else whole) | {"sums": sums})
            print(f"engine: {name}, turn {turn}: {len(group)} answers", flush=True)
    return records


def _counters(client: httpx.Client, url: str) -> Counter:
    """The counters once they stand still."""
    seen = None
    while True:
        answer = client.get(f"{url}/debug/mtp_stats")
        if answer.status_code == 200:
            now = read_counters(mtp_stats=answer.json())
        else:
            now = read_counters(metrics=_get(client, "GET", f"{url}/metrics").text)
        if now == seen:
            return now
        seen = now
        time.sleep(SETTLED_S)


def _model(client: httpx.Client, url: str) -> str:
    return _get(client, "GET", f"{url}/v1/models").json()["data"][0]["id"]


def _get(client: httpx.Client, method: str, url: str, **kwargs) -> httpx.Response:
    try:
        answer = client.request(method, url, **kwargs)
    except httpx.HTTPError as error:
        raise EngineError(f"{url}: {type(error).__name__} {error}".rstrip()) from None
    if answer.status_code != 200:
        raise EngineError(f"{url}: {answer.status_code} {answer.text[:200]!r}")
    return answer
