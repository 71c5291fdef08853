"""A served engine's own counters of acceptance, differenced around what it is asked: vLLM's Prometheus text, ATOM's mtp_stats."""

from __future__ import annotations

import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import httpx

from configs.command import PlainError
from configs.schema import Config
from train.sets import Question, answer_all

VLLM = re.compile(r"^vllm:spec_decode_num_(?:drafts|accepted_tokens_per_pos)_total\{([^}]*)\} (\S+)$", re.MULTILINE)
SETTLED_S = 0.3  # counters follow the answer that they count


class EngineError(PlainError):
    """A served engine that does not answer, or counts nothing; the message is one line."""


@dataclass
class Answer:
    """`sums` (`train.statistics`) of what was asked together with this answer, at the first of those."""

    response_ids: list[int]
    sums: dict[str, float] | None = None


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
    """Records (`train.statistics`) of the engine at `evaluate.engine`, asked set by set, `evaluate.concurrency` requests together: one
    record for each of those groups. Tokens are what it answered after the first one of each. Raises EngineError."""
    settings, url, records = config.evaluate, config.evaluate.engine.rstrip("/"), []
    with httpx.Client(timeout=config.pool.deadline_s, trust_env=False) as client, ThreadPoolExecutor(settings.concurrency) as threads:
        body = {"model": _get(client, "GET", f"{url}/v1/models").json()["data"][0]["id"], "max_tokens": settings.max_tokens}
        body |= {"temperature": 0.0 if settings.rule == "greedy" else settings.temperature, "return_token_ids": True}
        seeds = count(config.seed)  # one for each request: engines draw from it and the position alone

        def ask(prompt: list[int], seed: int) -> Answer:
            answer = _get(client, "POST", f"{url}/v1/completions", json=body | {"prompt": prompt, "seed": seed}).json()
            return Answer(answer["choices"][0]["token_ids"])

        def ask_together(prompts: list[list[int]]) -> list[Answer]:
            before = _counters(client, url)
            answers = list(threads.map(ask, prompts, [next(seeds) for _ in prompts]))
            counted = _counters(client, url)
            counted.subtract(before)
            tokens = float(sum(len(answer.response_ids) - 1 for answer in answers))
            answers[0].sums = dict.fromkeys((f"at_least/{k}" for k in range(1, block + 1)), 0.0) | counted | {"tokens": tokens}
            return answers

        for name in sorted({question.set for question in questions}):
            asked = [question for question in questions if question.set == name]
            answers = answer_all(f"engine, {name}", asked, tokenizer, settings.concurrency, ask_together)
            records += [question.record | {"sums": answer.sums} for question, answer in zip(asked, answers) if answer.sums]
    return records


def engine_version(url: str) -> str:
    """What the engine at `url` says that it is."""
    with httpx.Client(timeout=10, trust_env=False) as client:
        answer = _get(client, "GET", f"{url.rstrip('/')}/version", also=404)
        return f"vLLM {answer.json()['version']}" if answer.status_code == 200 else f"the one at {url}"


def _counters(client: httpx.Client, url: str) -> Counter:
    """The counters once they stand still."""
    seen = None
    while True:
        stats = _get(client, "GET", f"{url}/debug/mtp_stats", also=404)
        known = stats.status_code == 200
        now = read_counters(mtp_stats=stats.json()) if known else read_counters(metrics=_get(client, "GET", f"{url}/metrics").text)
        if now == seen:
            return now
        seen = now
        time.sleep(SETTLED_S)


def _get(client: httpx.Client, method: str, url: str, also: int = 200, **kwargs) -> httpx.Response:
    try:
        answer = client.request(method, url, **kwargs)
    except httpx.HTTPError as error:
        raise EngineError(f"{url}: {type(error).__name__} {error}".rstrip()) from None
    if answer.status_code not in (200, also):
        raise EngineError(f"{url}: {answer.status_code} {answer.text[:200]!r}")
    return answer
