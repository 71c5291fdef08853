"""The verifier answers prompts: the text that a draft is trained on is what its verifier says.

`python -m extract.rollout CONFIG --prompts FILE… --output FILE` (an extractor must be running)

A prompt is a line {"id", "turns": [user's texts]}, whose turns are answered in order, or {"id", "messages": [...]}, whose last
message is, after the others as given. A row is one answered turn: {"id", "prompt_ids", "response_ids", "finish_reason",
"messages", "text"}, with the id "ID/2" for the second turn and so on. Token ids are the truth: a later turn's prompt is the
earlier one's, the answer's own ids, and the template's text between. Rows are written as answers end and lie as their prompts do
once all have: what is trained on them does not depend on timing. An interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import IO

from configs.command import PlainError, command
from configs.load import parse
from configs.schema import Config
from extract.command import Progress, in_threads
from extract.obtain import StateSource, persist
from extract.pool import ExtractionError, Pool
from extract.render import RenderError, assistant_message, between_ids, load_tokenizer, prompt_ids, template_hash, tokenizer_hash
from store.files import appearing, try_lock, write

SAMPLING = {"temperature", "top_p", "top_k"}  # keys of `rollout` that go with each request, beside a seed


class RolloutError(PlainError):
    """Rollouts that cannot begin or go on; the message is one line."""


@dataclass(frozen=True)
class Prompt:
    """A conversation to hold: what is given, and the user's turns that are answered after it."""

    id: str
    given: list[dict]
    turns: list[str]

    def row_id(self, turn: int) -> str:
        return self.id if turn == 0 else f"{self.id}/{turn + 1}"


def read_prompts(files: list[Path]) -> list[Prompt]:
    """All prompts, ids of their rows unique. Raises RolloutError with file and line."""
    prompts, taken = [], set[str]()
    for file in files:
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise RolloutError(f"--prompts {file}: cannot be read ({error})") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    prompt = _prompt(json.loads(line))
                except (ValueError, TypeError, KeyError) as error:
                    raise RolloutError(f'{file}:{number}: {error!r}; a line is {{"id": ..., "turns": ["..."]}}') from None
                rows = {prompt.row_id(turn) for turn in range(len(prompt.turns))}
                if again := rows & taken:
                    raise RolloutError(f"{file}:{number}: id {min(again)!r} is taken by an earlier prompt")
                prompts.append(prompt)
                taken |= rows
    if not prompts:
        raise RolloutError("--prompts: no prompt in " + ", ".join(map(str, files)))
    return prompts


def _prompt(row: dict) -> Prompt:
    messages = row["messages"] if "messages" in row else [{"role": "user", "content": turn} for turn in row["turns"]]
    if not messages or messages[-1]["role"] != "user" or not all(isinstance(message["content"], str) for message in messages):
        raise ValueError("texts that end with a user's turn are expected")
    first = len(messages) if "messages" not in row else 1
    return Prompt(str(row["id"]), messages[: len(messages) - first], [message["content"] for message in messages[-first:]])


@contextmanager
def continued(path: Path, settings: dict) -> Iterator[tuple[IO[bytes], dict[str, dict]]]:
    """The output file, to append whole rows to, and its rows by id; beside it lie the settings that they were made with.

    Raises RolloutError: another process writes it, it has answers of other settings, or something else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if not try_lock(file) or not os.path.samestat(os.fstat(file.fileno()), path.stat()):  # or it has just put its rows in order
            raise RolloutError(f"{path}: is being written by another process; wait for it, or give another --output")
        for left in path.parent.glob(f".{escape(path.name)}.*.[0-9]*"):  # of a process that was killed while it put rows in order
            left.unlink()
        _agree(path, settings)
        yield file, _read(path)


def _agree(path: Path, settings: dict) -> None:
    beside = path.with_name(path.name + ".settings.json")
    if not path.stat().st_size:
        write(beside, json.dumps(settings, indent=2) + "\n")
        return
    if not beside.exists():
        raise RolloutError(f"{path}: not a file of this command ({beside.name} is missing)")
    old = json.loads(beside.read_text())
    if differ := [f"{key} {old.get(key)!r} then, {settings.get(key)!r} now" for key in settings if old.get(key) != settings[key]]:
        raise RolloutError(f"{path}: has answers of other settings ({'; '.join(differ)}); give another --output")


def _read(path: Path) -> dict[str, dict]:
    """Rows by id; a last line that was not finished is cut off."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    os.truncate(path, whole)
    try:
        return {row["id"]: row for row in map(json.loads, data[:whole].splitlines())}
    except (ValueError, TypeError, KeyError):
        raise RolloutError(f"{path}: has a line that is no rollout; give another --output") from None


def _put_in_order(path: Path, rows: list[str], done: dict[str, dict]) -> None:
    """The file anew, its rows in the order of `rows`; before them those of prompts that were not asked for this time."""
    asked = set(rows)
    order = [row for row in done if row not in asked] + [row for row in rows if row in done]
    if order == list(done):
        return
    try:
        with appearing(path) as partial, partial.open("wb") as file:
            file.writelines(_line(done[row]) for row in order)
            file.flush()
            os.fsync(file.fileno())  # else a power cut could leave the new name without the old rows
    except OSError as error:
        raise RolloutError(f"{path}: has all answers, not yet in order ({error.strerror}); the same command puts them so") from None


def _line(row: dict) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def converse(
    config: Config, tokenizer, pool: Pool | StateSource, retries: Counter[str], done: dict[str, dict], prompt: Prompt
) -> Iterator[dict | tuple[Prompt, int, Exception]]:
    """Rows of the turns that are not `done`, and for a turn that cannot be answered: its prompt, turn and reason.

    Raises RolloutError, NoStates.
    """
    messages, before = list(prompt.given), None
    for turn, text in enumerate(prompt.turns):
        user = {"role": "user", "content": text}
        try:
            if before is None:
                ids = prompt_ids(tokenizer, [*messages, user])
            else:
                ids = before["prompt_ids"] + before["response_ids"]
                ids = ids + between_ids(tokenizer, messages[:-1], user, ids[-1])
            messages.append(user)
            row = done.get(prompt.row_id(turn))
            if row is None:
                row = answer(config, tokenizer, pool, retries, prompt.row_id(turn), ids, messages)
                yield row
            elif row["prompt_ids"] != ids:
                raise RolloutError(f"prompt {prompt.row_id(turn)!r} is not the one that was answered; give another --output")
        except (RenderError, ExtractionError) as error:
            yield prompt, turn, error
            return
        messages.append(row["messages"][-1])
        before = row


def answer(
    config: Config, tokenizer, pool: Pool | StateSource, retries: Counter[str], row_id: str, ids: list[int], messages: list[dict]
) -> dict:
    """One answered turn. Raises ExtractionError for a prompt that cannot be answered, NoStates where nobody answers."""
    settings, seed = config.rollout, zlib.crc32(f"{config.seed}/{row_id}".encode())  # the same in any order
    sampling = settings.model_dump(include=SAMPLING) | {"seed": seed}
    response, reason = persist(config.pool, lambda _: pool.complete(ids, settings.max_tokens, **sampling), retries)
    messages, text = [*messages, assistant_message(tokenizer, response)], tokenizer.decode(response, skip_special_tokens=True)
    return dict(id=row_id, prompt_ids=ids, response_ids=response, finish_reason=reason, messages=messages, text=text)


def rollout(config: Config, prompts: list[Prompt], output: Path, tokenizer, pool: Pool) -> Counter:
    """Answer what is not answered yet; counts of rows by finish reason or, where there is none, by cause. Raises RolloutError."""
    sampling, contract, answers = config.rollout, pool.contract(), pool
    if sampling.states:
        answers = StateSource(config, pool, keep=True)
        answers.contract = contract
    settings = {
        "verifier": contract.verifier,
        "tokenizer": tokenizer_hash(tokenizer),
        "template": template_hash(tokenizer),
        "max_tokens": sampling.max_tokens,
        **sampling.model_dump(include=SAMPLING),
        "seed": config.seed if sampling.temperature else None,
    }
    rows = [prompt.row_id(turn) for prompt in prompts for turn in range(len(prompt.turns))]
    progress, counts, retries = Progress(), Counter[str](), Counter[str]()
    output = output.resolve()  # a link to the file stays one
    with continued(output, settings) as (file, done):
        already, answered, tokens = sum(row in done for row in rows), 0, 0

        def line() -> str:
            again = "".join(f", tried again: {times} {cause}" for cause, times in dict(retries).items())
            return f"rollout: {already + answered} of {len(rows)} answers, {tokens / progress.seconds():.0f} tok/s{again}"

        work = partial(converse, config, tokenizer, answers, retries, dict(done))
        for result in in_threads(work, prompts, config.rollout.concurrency):
            if isinstance(result, dict):
                file.write(_line(result))
                file.flush()
                done[result["id"]] = result
                answered, tokens = answered + 1, tokens + len(result["response_ids"])
                progress.tell(line(), answered / (len(rows) - already))
                continue
            prompt, turn, error = result
            cause = getattr(error, "cause", "template")
            counts[cause] += len(prompt.turns) - turn
            print(f"rollout: {prompt.row_id(turn)}: {cause}: {error}", file=sys.stderr, flush=True)
        _put_in_order(output, rows, done)
    progress.say(line())
    counts.update(done[row]["finish_reason"] for row in rows if row in done)
    return counts


@command("extract.rollout")
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="extract.rollout", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", nargs="+", type=Path, required=True, metavar="FILE", help="JSONL of prompts")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSONL of answers; continued if it is there")
    args, config = parse(parser, argv)
    try:
        prompts = read_prompts(args.prompts)
        counts = rollout(config, prompts, args.output, load_tokenizer(config.verifier), Pool(config))
    except KeyboardInterrupt:
        print(f"\nextract.rollout: interrupted; the same command goes on where {args.output} ends", file=sys.stderr)
        return 130
    answered, cut = counts["stop"] + counts["length"], counts["length"]
    refused = {cause: count for cause, count in counts.items() if cause not in ("stop", "length")}
    print(f"{args.output}: {answered} answers, {cut} of them cut at rollout.max_tokens, refused: {refused or 'none'}")
    return 0 if answered else 1


if __name__ == "__main__":
    sys.exit(main())
