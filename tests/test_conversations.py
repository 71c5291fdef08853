"""All forms of a conversation come to one; what cannot be used is dropped under its cause."""

from __future__ import annotations

import json

import pytest

from extract.conversations import Conversation, Dropped, Rollout, read_row

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"role": "tool", "content": "1", "tool_call_id": "c"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER, USER]},  # a question that nobody answered
        {"messages": [USER, ANSWER], "tools": None},
        {"messages": [USER, ANSWER], "tools": ""},
        {"messages": [{"role": "system", "content": " "}, USER, ANSWER]},
        {"messages": [USER, ANSWER | {"weight": 1, "tool_calls": None, "reasoning_content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, ANSWER]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"prompt": "Hi", "response": "Hello"},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"question": "Hi", "answer": "Hello"},
    ],
)
def test_forms(row):
    assert read_row(row) == Conversation([USER, ANSWER])


def test_system_texts():
    system = {"role": "system", "content": "Be brief"}
    assert read_row({"system": "Be brief", "conversations": [{"from": "user", "value": "Hi"}, ANSWER]}).messages == [system, USER, ANSWER]
    assert read_row({"messages": [{"role": "developer", "content": "Be brief"}, USER, ANSWER]}).messages == [system, USER, ANSWER]
    assert read_row({"instruction": "Add", "input": "1 2", "output": "3"}).messages[0]["content"] == "Add\n\n1 2"


@pytest.mark.parametrize(
    "call",
    [
        CALLS,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    ],
)
@pytest.mark.parametrize("tools", [[{"type": "function"}], json.dumps([{"type": "function"}])])
def test_tool_calls(call, tools):
    found = read_row({"messages": [USER, call, TOOL, ANSWER], "tools": tools})
    assert found == Conversation([USER, CALLS, TOOL, ANSWER], [{"type": "function"}])


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_with_and_without_content(field):
    for content in ("Hello", ""):
        [_, answer] = read_row({"messages": [USER, {"role": "assistant", "content": content, field: "Hm"}]}).messages
        assert answer == {"role": "assistant", "content": content, "reasoning_content": "Hm"}


def test_rollouts_keep_their_ids():
    row = {"prompt_ids": [1, 2], "response_ids": [3], "finish_reason": "length", "messages": [USER], "text": "x"}
    assert read_row(row) == Rollout([1, 2], [3], "length")


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        (3, "not_a_row"),
        (None, "not_a_row"),
        ([USER, ANSWER], "not_a_row"),
        ({}, "no_conversation"),
        ({"text": "plain"}, "no_conversation"),
        ({"messages": "Hi"}, "no_conversation"),
        ({"messages": []}, "no_answer"),
        ({"messages": [USER]}, "no_answer"),
        ({"messages": [ANSWER, USER, ANSWER]}, "assistant_first"),
        ({"messages": [{"role": "system", "content": "x"}, ANSWER]}, "assistant_first"),
        ({"messages": ["Hi", ANSWER]}, "not_a_message"),
        ({"messages": [{"role": "narrator", "content": "x"}, ANSWER]}, "unknown_role"),
        ({"messages": [{"content": "x"}, ANSWER]}, "unknown_role"),
        ({"messages": [{"role": ["user"], "content": "x"}, ANSWER]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": " \n"}, ANSWER]}, "empty_turn"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "empty_turn"),
        ({"messages": [USER, {"role": "assistant"}, USER, ANSWER]}, "empty_turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, ANSWER]}, "not_text"),
        ({"messages": [{"role": "user", "content": 7}, ANSWER]}, "not_text"),
        ({"messages": [USER, ANSWER], "tools": "{"}, "bad_tools"),
        ({"messages": [USER, ANSWER], "tools": [1]}, "bad_tools"),
        ({"messages": [USER, ANSWER], "tools": '"x"'}, "bad_tools"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "bad_tools"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "bad_tools"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": ["f"]}]}, "bad_tools"),
        ({"prompt_ids": [1, -2], "response_ids": [3], "finish_reason": "stop"}, "bad_ids"),
        ({"prompt_ids": [1, True], "response_ids": [3], "finish_reason": "stop"}, "bad_ids"),
        ({"prompt_ids": "12", "response_ids": [3], "finish_reason": "stop"}, "bad_ids"),
        ({"prompt_ids": [1], "response_ids": [], "finish_reason": "stop"}, "empty_turn"),
        ({"prompt_ids": [1], "response_ids": [2], "finish_reason": "abort"}, "unfinished"),
    ],
)
def test_what_cannot_be_used(row, cause):
    with pytest.raises(Dropped) as drop:
        read_row(row)
    assert drop.value.cause == cause
