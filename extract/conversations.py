"""Rows as people have them, brought to one form: message lists, ShareGPT, prompt/response pairs, rollouts.

A row that cannot be used raises `Dropped` with its cause; nothing vanishes in silence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "ipython"), "tool"),
}
PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
REASONING = ("reasoning_content", "reasoning", "thinking")


class Dropped(Exception):
    """A row that is left out: `cause` is one word for the report, `detail` says what was found."""

    def __init__(self, cause: str, detail: str = ""):
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause, self.detail = cause, detail


@dataclass(frozen=True)
class Conversation:
    """Messages {role, content, reasoning_content?, tool_calls?, name?, tool_call_id?} that end with an assistant's."""

    messages: list[dict]
    tools: list[dict] | None = None


@dataclass(frozen=True)
class Rollout:
    """What an engine was given and what it generated, as its own token ids."""

    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str
    asked: list[dict] | None = None  # of a later turn: what the first one answered


def read_row(row: object) -> Conversation | Rollout:
    """One row of a data file. Raises Dropped."""
    if not isinstance(row, dict):
        raise Dropped("not_a_row", f"an object was expected, got {type(row).__name__}")
    if row.get("prompt_ids") is not None and row.get("response_ids") is not None:
        return _rollout(row)
    messages = [_message(item) for item in _turns(row)]
    system = row.get("system") or row.get("system_prompt")
    if isinstance(system, str) and system.strip() and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system})
    messages = [message for message in messages if message["role"] != "system" or message["content"].strip()]
    while messages and messages[-1]["role"] != "assistant":  # nothing after the last answer is supervised
        messages.pop()
    if not messages:
        raise Dropped("no_answer", "no turn of the assistant")
    if next(message["role"] for message in messages if message["role"] != "system") == "assistant":
        raise Dropped("assistant_first", "an answer to nothing")
    return Conversation(messages, _tools(row.get("tools")))


def _rollout(row: dict) -> Rollout:
    for field in ("prompt_ids", "response_ids"):
        if not isinstance(row[field], list) or not all(type(token) is int and token >= 0 for token in row[field]):
            raise Dropped("bad_ids", f"{field} is not a list of token ids")
    if not row["prompt_ids"] or not row["response_ids"]:
        raise Dropped("empty_turn", "a rollout without " + ("response" if row["prompt_ids"] else "prompt"))
    if row.get("finish_reason") not in ("stop", "length"):
        raise Dropped("unfinished", f"finish_reason {row.get('finish_reason')!r}, not stop or length")
    messages = row.get("messages")
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages] if isinstance(messages, list) else []
    asked = messages[: roles.index("assistant")] if roles.count("assistant") > 1 else None
    return Rollout(row["prompt_ids"], row["response_ids"], row["finish_reason"], asked)


def _turns(row: dict) -> list:
    for field in ("messages", "conversations", "conversation"):
        if isinstance(row.get(field), list):
            return row[field]
    for asked, answered in PAIRS:
        if row.get(asked) is not None and row.get(answered) is not None:
            question, answer = row[asked], row[answered]
            if isinstance(row.get("input"), str) and row["input"].strip() and isinstance(question, str):
                question = f"{question}\n\n{row['input']}"
            question = question if isinstance(question, list) else [{"role": "user", "content": question}]
            return question + (answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])
    raise Dropped("no_conversation", f"fields: {', '.join(map(str, row))[:100] or 'none'}")


def _message(item: object) -> dict:
    """One message in OpenAI's form, from that or from ShareGPT's {from, value}."""
    if not isinstance(item, dict):
        raise Dropped("not_a_message", f"an object was expected, got {type(item).__name__}")
    given = item.get("role", item.get("from"))
    role = ROLES.get(given.lower()) if isinstance(given, str) else None
    if role is None:
        raise Dropped("unknown_role", repr(given)[:80])
    content = item["content"] if item.get("content") is not None else item.get("value")
    message = {"role": role, "content": _text(content)}
    if role == "assistant":
        calls = item.get("tool_calls")
        if given == "function_call":
            calls, message["content"] = _json(message["content"]), ""
        if calls:
            message["tool_calls"] = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
        reasoning = next((item[field] for field in REASONING if item.get(field)), None)
        if reasoning:
            message["reasoning_content"] = _text(reasoning)
    message |= {field: item[field] for field in ("name", "tool_call_id") if isinstance(item.get(field), str)}
    said = message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content", "").strip()
    if role in ("user", "assistant") and not said:
        raise Dropped("empty_turn", f"a turn of the {role} is empty")
    return message


def _text(content: object) -> str:
    """A content as one string; parts are joined, and a part that is not text cannot be used."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [{"text": part} if isinstance(part, str) else part for part in content]
        if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            return "".join(part["text"] for part in parts)
    raise Dropped("not_text", f"content of type {type(content).__name__} has parts that are not text")


def _call(call: object) -> dict:
    """A tool call as {"type": "function", "function": {name, arguments}}, arguments an object where they are one."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Dropped("bad_tools", "a tool call without the name of a function")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}")
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": {} if arguments is None else arguments}}


def _tools(tools: object) -> list[dict] | None:
    if isinstance(tools, str):
        tools = _json(tools) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Dropped("bad_tools", "tools are not a list of objects")
    return tools


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Dropped("bad_tools", f"not JSON ({error})") from None
