"""A seeded generator of rows as bad dumps have them: broken, mistyped, forged and strange ones between good ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

WORDS = [
    "the",
    "answer",
    "is",
    "42",
    "\n\n",
    "code:",
    "```",
    "你好",
    "🙂🏽",
    "é",
    "Straße",
    "مرحبا",
    "\t",
    "\u200b",
    "\x00",
    "\ufeff",
    "…",
    "  ",
]
FORGED = ["<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "</s>", "{{ 7 * 7 }}", "{% raise %}", "<|endoftext|>", "\ud800"]
ROLES = ["user", "assistant", "system", "tool", "human", "gpt", "USER", "narrator", "", None, 3, ["user"]]
JUNK = [None, True, 0, -1, 1.5, float("nan"), 10**400, "", "x", [], {}, [[]], [None], {"a": {}}, "\ud83d", {"role": "user"}]


def text(rng: random.Random) -> str:
    words = [rng.choice(WORDS) for _ in range(rng.choice([0, 1, 3, 3, 10, 10, 10, 10, 10, 40]))]
    if rng.random() < 0.05:
        words.insert(rng.randrange(len(words) + 1), rng.choice(FORGED))
    return " ".join(words) if rng.random() < 0.999 else "a" * 20_000


def message(rng: random.Random, role: object) -> object:
    item: dict = {"role": role, "content": text(rng)}
    if rng.random() < 0.05:
        item["content"] = rng.choice([[{"type": "text", "text": text(rng)}], [{"type": "image_url", "image_url": "x"}], rng.choice(JUNK)])
    if rng.random() < 0.1:
        item[rng.choice(["reasoning_content", "reasoning", "thinking", "name", "tool_call_id"])] = rng.choice([text(rng), rng.choice(JUNK)])
    if rng.random() < 0.1:
        call = {"function": {"name": "f", "arguments": rng.choice([{"x": text(rng)}, '{"x": 1}', "{", *JUNK])}}
        item["tool_calls"] = rng.choice([[call], [call, call], call, *JUNK])
    return item if rng.random() < 0.98 else rng.choice(JUNK)


def row(rng: random.Random, number: int) -> object:
    turns = ["user", "assistant"] * rng.choice([1, 1, 1, 2, 5])
    if rng.random() < 0.1:
        turns[rng.randrange(len(turns))] = rng.choice(ROLES)
    if rng.random() < 0.05:
        rng.shuffle(turns)
    messages = [message(rng, role) for role in turns]
    kind = rng.random()
    if kind < 0.6:
        made: dict = {"id": number, "messages": messages}
    elif kind < 0.75:
        made = {
            "conversations": [{"from": m["role"], "value": m["content"]} if isinstance(m, dict) and "content" in m else m for m in messages]
        }
    elif kind < 0.85:
        made = {"prompt": rng.choice([text(rng), messages, *JUNK]), "response": rng.choice([text(rng), *JUNK])}
    elif kind < 0.95:
        ids = [rng.choice([1, 5, 900, 10**6, -1, "1", None, 2.0]) if rng.random() < 0.01 else rng.randrange(900) for _ in range(20)]
        made = {
            "prompt_ids": ids[:8],
            "response_ids": ids[8:] if rng.random() < 0.9 else rng.choice(JUNK),
            "finish_reason": rng.choice(["stop", "length", "x", None]),
        }
    else:
        return rng.choice(JUNK)
    if rng.random() < 0.1:
        made[rng.choice(["tools", "system", "id", "messages", "input"])] = rng.choice(["[]", "[{]", [{"type": "function"}], *JUNK])
    return made


def lines(count: int, seed: int = 0) -> Iterator[bytes]:
    """`count` lines of JSON, one in fifty of them damaged."""
    rng = random.Random(seed)
    last = b"{}"
    for number in range(count):
        line = json.dumps(row(rng, number), ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        chance = rng.random()
        if chance < 0.01:
            line = line[: rng.randrange(len(line) + 1)] or b"{"
        elif chance < 0.015:
            at = rng.randrange(len(line))
            line = line[:at] + bytes([rng.randrange(128, 256)]) + line[at:]
        elif chance < 0.02:
            line = b"[" * 10_000
        elif chance < 0.03:
            line = last
        last = line
        yield line.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"
