"""Rollouts: token ids are the truth, interrupted runs go on, and nothing is mixed that does not belong together."""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter

import pytest
from families import FAMILIES, make_verifier
from tiny import write_recipe

from configs.load import load
from configs.schema import Verifier
from extract.obtain import NoStates
from extract.pool import ExtractionError, Pool
from extract.render import assistant_message, between_ids, load_tokenizer, prompt_ids, render
from extract.rollout import RolloutError, main, read_prompts, rollout

CHAT = [{"role": "user", "content": "What is 2 + 2?"}]
NEXT = {"role": "user", "content": "And 3 + 3?"}


class FakePool:
    """Answers with the ids of a text and the end of turn; what it was asked is kept."""

    def __init__(self, tokenizer, text="It is four.", fail: Counter | None = None):
        self.tokenizer, self.text, self.asked, self.fail = tokenizer, text, [], fail or Counter()

    def complete(self, token_ids, max_tokens, **sampling):
        self.asked.append(token_ids)
        for cause, times in self.fail.items():
            if times > 0:
                self.fail[cause] -= 1
                raise ExtractionError(cause, f"{cause} it is")
        ids = [*self.tokenizer.encode(self.text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return ids[:max_tokens], "stop" if len(ids) <= max_tokens else "length"

    def contract(self):
        class Contract:
            verifier = "fingerprint"

        return Contract


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatml")
    make_verifier(folder, "chatml")
    return load_tokenizer(Verifier(path=str(folder)))


@pytest.fixture
def config(tmp_path):
    return load(write_recipe(tmp_path, tmp_path / "verifier"), ["rollout.max_tokens=32", "pool.attempts=3"])


def prompts_file(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", [False, True])
def test_history_is_what_the_template_would_show(tmp_path, family, cut):
    """With an answer whose text round trips, ids put together turn by turn are those of the whole conversation."""
    tokenizer = load_tokenizer(make_verifier(tmp_path, family))
    answer = "It is four."
    first = prompt_ids(tokenizer, CHAT)
    response = tokenizer.encode(answer, add_special_tokens=False) + ([] if cut else [tokenizer.eos_token_id])
    ids = first + response + between_ids(tokenizer, CHAT, NEXT, response[-1])
    whole = render(tokenizer, [*CHAT, {"role": "assistant", "content": answer}, NEXT], prompt=True)
    # Templates may lead an earlier answer in by something else than they lead in the next one (Qwen3's empty thought).
    start = whole.index(answer)
    assert tokenizer.decode(ids[len(first) :]) == whole[start:]


def test_turns_are_answered_in_order_and_ids_are_kept(tmp_path, config, tokenizer):
    pool = FakePool(tokenizer)
    prompts = read_prompts([prompts_file(tmp_path, {"id": "two", "turns": ["What is 2 + 2?", "And 3 + 3?"]})])
    counts = rollout(config, prompts, tmp_path / "out.jsonl", tokenizer, pool)
    first, second = lines(tmp_path / "out.jsonl")
    assert counts == {"stop": 2}
    assert (first["id"], second["id"]) == ("two", "two/2")
    assert second["prompt_ids"][: len(first["prompt_ids"] + first["response_ids"])] == first["prompt_ids"] + first["response_ids"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user", "assistant"]
    assert first["text"] == "It is four." and first["response_ids"][-1] == tokenizer.eos_token_id
    assert pool.asked == [first["prompt_ids"], second["prompt_ids"]]


def test_messages_are_history_as_given(tmp_path, config, tokenizer):
    given = [{"role": "system", "content": "Be brief."}, *CHAT, {"role": "assistant", "content": "4"}, NEXT]
    prompts = read_prompts([prompts_file(tmp_path, {"id": 7, "messages": given})])
    rollout(config, prompts, tmp_path / "out.jsonl", tokenizer, FakePool(tokenizer))
    (row,) = lines(tmp_path / "out.jsonl")
    assert row["id"] == "7" and row["prompt_ids"] == prompt_ids(tokenizer, given) and row["messages"][:-1] == given


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_is_kept_apart(tmp_path, special):
    tokenizer = load_tokenizer(make_verifier(tmp_path, "chatml"))
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special)
    ids = tokenizer.encode("<think>Two and two.</think>\n\nIt is four.", add_special_tokens=False)
    message = assistant_message(tokenizer, [*ids, tokenizer.eos_token_id])
    assert message == {"role": "assistant", "content": "It is four.", "reasoning_content": "Two and two."}
    assert "reasoning_content" not in assistant_message(tokenizer, tokenizer.encode("It is four.", add_special_tokens=False))


@pytest.mark.parametrize("kept", ["half of it", "three rows backwards", "all backwards", "nothing"])
def test_resuming_gives_the_same_file(tmp_path, config, tokenizer, kept):
    """Byte for byte, whatever was there and in whichever order it was answered."""
    rows = [{"id": f"p{index}", "turns": [f"Question {index}\u2028here?", "Why?"]} for index in range(6)]
    prompts, output = read_prompts([prompts_file(tmp_path, *rows)]), tmp_path / "out.jsonl"
    rollout(config, prompts, output, tokenizer, FakePool(tokenizer))
    assert [row["id"] for row in lines(output)] == [prompt.row_id(turn) for prompt in prompts for turn in range(2)]
    data = output.read_bytes()
    backwards = [line + b"\n" for line in data.split(b"\n")[-2::-1]]
    there = {
        "half of it": data[: len(data) // 2],
        "three rows backwards": b"".join(backwards[:3]),
        "all backwards": b"".join(backwards),
        "nothing": b"",
    }[kept]
    output.write_bytes(there)
    pool = FakePool(tokenizer)
    rollout(config, prompts, output, tokenizer, pool)
    assert output.read_bytes() == data and len(pool.asked) == 12 - there.count(b"\n")


def test_rows_of_prompts_that_are_not_asked_for_are_kept(tmp_path, config, tokenizer):
    prompts = read_prompts([prompts_file(tmp_path, *({"id": f"p{index}", "turns": ["Hi"]} for index in range(4)))])
    output = tmp_path / "out.jsonl"
    rollout(config, prompts[2:], output, tokenizer, FakePool(tokenizer))
    rollout(config, prompts[:2], output, tokenizer, FakePool(tokenizer))
    assert [row["id"] for row in lines(output)] == ["p2", "p3", "p0", "p1"]


def test_putting_in_order_loses_nothing(tmp_path, config, tokenizer, monkeypatch):
    """A link stays one; without room all rows stay as they are; what a killed process left goes; who came too late is told."""
    prompts = read_prompts([prompts_file(tmp_path, *({"id": f"p{index}", "turns": ["Hi"]} for index in range(4)))])
    file, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    output.symlink_to(file)
    rollout(config, prompts, output, tokenizer, FakePool(tokenizer))
    data = file.read_bytes()
    backwards = b"".join(line + b"\n" for line in data.split(b"\n")[-2::-1])
    file.write_bytes(backwards)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(RolloutError, match="has all answers, not yet in order"):
            rollout(config, prompts, output, tokenizer, FakePool(tokenizer))
    assert file.read_bytes() == backwards and not list(tmp_path.glob(".*"))
    (tmp_path / ".rows.jsonl.node1.77").write_text("half of them")
    (tmp_path / ".rows.jsonl.swp").write_text("an editor's")
    rollout(config, prompts, output, tokenizer, FakePool(tokenizer))
    assert file.read_bytes() == data and output.is_symlink() and [path.name for path in tmp_path.glob(".*")] == [".rows.jsonl.swp"]

    def late(opened) -> bool:
        file.rename(tmp_path / "old")
        file.write_bytes(data)
        return True

    monkeypatch.setattr("extract.rollout.try_lock", late)
    with pytest.raises(RolloutError, match="written by another process"):
        rollout(config, prompts, output, tokenizer, FakePool(tokenizer))


def test_other_settings_are_refused_by_name(tmp_path, config, tokenizer):
    prompts, output = read_prompts([prompts_file(tmp_path, {"id": "a", "turns": ["Hi"]})]), tmp_path / "out.jsonl"
    rollout(config, prompts, output, tokenizer, FakePool(tokenizer))
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_tokens": 64, "temperature": 0.7})})
    with pytest.raises(RolloutError, match=r"max_tokens 32 then, 64 now; temperature 0\.0 then, 0\.7 now"):
        rollout(other, prompts, output, tokenizer, FakePool(tokenizer))
    with pytest.raises(RolloutError, match="'a' is not the one that was answered"):
        changed = read_prompts([prompts_file(tmp_path, {"id": "a", "turns": ["Ho"]})])
        rollout(config, changed, output, tokenizer, FakePool(tokenizer))
    with output.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody has kept it
        with pytest.raises(RolloutError, match="is being written by another process"):
            rollout(config, prompts, output, tokenizer, FakePool(tokenizer))
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"messages": []}\n')
    with pytest.raises(RolloutError, match="not a file of this command"):
        rollout(config, prompts, foreign, tokenizer, FakePool(tokenizer))


def test_what_cannot_be_answered_is_counted_and_what_can_is_tried_again(tmp_path, config, tokenizer, capsys):
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"concurrency": 1})})
    prompts = read_prompts([prompts_file(tmp_path, *({"id": name, "turns": ["Hi", "Ho"]} for name in "ab"))])
    output = tmp_path / "out.jsonl"
    assert rollout(config, prompts, output, tokenizer, FakePool(tokenizer, fail=Counter(too_long=1))) == {"too_long": 2, "stop": 2}
    assert rollout(config, prompts, output, tokenizer, FakePool(tokenizer, fail=Counter(unreachable=2))) == {"stop": 4}
    assert "tried again: 2 unreachable" in capsys.readouterr().err
    output.unlink()
    config = config.model_copy(update={"pool": config.pool.model_copy(update={"deadline_s": 0.01})})  # who is away has come back by then
    with pytest.raises(NoStates, match="attempts failed, the last one: unreachable"):
        rollout(config, prompts, output, tokenizer, FakePool(tokenizer, fail=Counter(unreachable=9)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompt in"),
        ("{", "prompts.jsonl:1: "),
        ('{"id": "a"}', "prompts.jsonl:1: KeyError"),
        ('{"id": "a", "turns": []}', "end with a user's turn"),
        ('{"id": "a", "turns": ["x"]}\n{"id": "a", "turns": ["y"]}', "prompts.jsonl:2: id 'a' is taken"),
        ('{"id": "a", "turns": ["x", "y"]}\n{"id": "a/2", "turns": ["z"]}', "prompts.jsonl:2: id 'a/2' is taken"),
    ],
)
def test_bad_prompts_are_one_line(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(RolloutError, match=message) as error:
        read_prompts([path])
    assert "\n" not in str(error.value)


def test_without_an_extractor_it_says_so(tmp_path, tiny_verifier, capsys):
    recipe = write_recipe(tmp_path, tiny_verifier("llama"))
    prompts = prompts_file(tmp_path, {"id": "a", "turns": ["Hi"]})
    assert main([str(recipe), "--prompts", str(prompts), "--output", str(tmp_path / "out.jsonl")]) == 1
    assert "no extractor has registered in" in capsys.readouterr().err


@pytest.mark.integration
def test_the_command_with_a_real_extractor(extractor, tmp_path, capsys):
    rows = [{"id": f"p{index}", "turns": [f"Question {index}?"] + ["More?"] * (index % 2)} for index in range(20)]
    prompts, output = prompts_file(tmp_path, *rows), tmp_path / "out.jsonl"
    command = [str(extractor.recipe), "rollout.temperature=0.5", "--prompts", str(prompts), "--output", str(output)]
    assert main(command) == 0
    answered = lines(output)
    assert len(answered) == 30 and "30 answers" in capsys.readouterr().out
    pool, sampling = Pool(extractor.config), extractor.config.rollout
    greedy = [pool.complete(row["prompt_ids"], sampling.max_tokens)[0] for row in answered[:3]]
    assert all(ids != row["response_ids"] for ids, row in zip(greedy, answered))
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:11]))
    assert main(command) == 0
    assert sorted(lines(output), key=lambda row: row["id"]) == sorted(answered, key=lambda row: row["id"])
