"""Which tokens of a conversation the verifier would generate, proven for each row.

A turn's tokens begin where the prompt that asks for it ends, and end with the end-of-turn token. Both borders are found in
the rendering of the whole conversation, since that is what is trained on, and confirmed by the rendering that ends with the
turn. What the template adds (headers, an empty think block, the generation prompt) is not supervised. What cannot be
confirmed drops the row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from extract.conversations import Conversation, Dropped
from extract.render import RenderError, generated_spans, marks_generation, render

EMPTY_THINK = re.compile(r"\s*(<think>)?\s*</think>\n*")  # the opening tag may stand in the prompt
WHOLE_THINK = re.compile(r"\s*<think>(.*?)</think>\n*(.*)", re.DOTALL)
PROMPT_THINK = re.compile(r"(<think>\s*)?(</think>\s*)?\Z")
SHOWN_THINK = re.compile(r"\s*(<think>\s*(</think>\s*)?)?")
PROBE = "\ue000"  # a private character: no answer begins with it
HEADER = 64  # characters before a turn in which a special token is looked for
NEAR = 8  # characters by which the end of a prompt is known again


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the messages that the template was given for it."""

    text: str
    messages: list[dict]
    tools: list[dict] | None


class Supervisor:
    """Turns conversations into token ids and loss masks by one verifier's tokenizer and template: `render`, `encode`, `supervise`.

    stop_ids: tokens that end the verifier's turn; turns: supervise "all" of the assistant's turns or the "last".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], turns: str = "all"):
        self.tokenizer, self.turns = tokenizer, turns
        stops = tokenizer.convert_ids_to_tokens(sorted(stop_ids))
        self._stop = _any_of(stops)
        self._special = _any_of([*stops, *map(str, tokenizer.added_tokens_decoder.values())])
        self._marked = marks_generation(tokenizer)
        template = str(tokenizer.chat_template)
        self._asks = "add_generation_prompt" in template
        self._reasons = "reasoning_content" in template and not re.search(r"""split\(\\?['"]</think>""", template)
        self._header = "" if self._asks else self._added_header()
        self._tails: dict[str, list[int]] = {}  # ids of what stands right before a turn: few texts, asked for often

    def render(self, conversation: Conversation) -> Rendered:
        """The conversation as the template shows it. Raises Dropped."""
        tools = conversation.tools
        messages = list(map(_with_reasoning, conversation.messages)) if self._reasons else conversation.messages
        for message in messages:
            if message["role"] == "assistant" and any(map(self._stop.search, _strings(message))):
                raise Dropped("stop_in_text", "an answer contains an end-of-turn token as text")
        try:
            try:
                text = render(self.tokenizer, messages, tools)
            except RenderError:
                if not any(message.get("tool_calls") for message in messages):
                    raise
                messages = _arguments_as_text(messages)  # as some templates want them
                text = render(self.tokenizer, messages, tools)
            text.encode()
            return Rendered(text, messages, tools)
        except RenderError as error:
            raise Dropped("template_rejects", str(error)) from None
        except UnicodeEncodeError:
            raise Dropped("bad_utf8", "a lone surrogate") from None

    def encode(self, texts: list[str]) -> list[Encoding | None]:
        """Encodings of the tokenizers library, which know the characters of each token; None of a tokenizer in Python."""
        if not self.tokenizer.is_fast:
            return [None] * len(texts)
        return self.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)

    def supervise(self, rendered: Rendered, encoding: Encoding | None, length: int) -> tuple[np.ndarray, np.ndarray]:
        """ids int32 [T] of the rendered conversation and mask uint8 [T], 1 where the verifier would generate the token.

        Turns that begin after `length` tokens are not looked at. Raises Dropped.
        """
        text, limit = rendered.text, len(rendered.text)
        if encoding and len(encoding) > length:
            limit = encoding.token_to_chars(length)[0]
        try:
            spans = self._spans(text, rendered.messages, rendered.tools, limit)
        except RenderError as error:
            raise Dropped("template_rejects", str(error)) from None
        return self._by_offsets(text, spans, encoding) if encoding else self._by_pieces(text, spans)

    def _spans(self, text: str, messages: list[dict], tools: list[dict] | None, limit: int) -> list[tuple[int, int]]:
        """Character ranges of the turns that begin before `limit`."""
        if self._marked:
            borders = [self._borders(text, *span) for span in generated_spans(self.tokenizer, messages, tools)]
            spans = [(begin, end) for begin, stop, end in borders if begin < stop]
            return spans if self.turns == "all" else spans[-1:]
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for index in answers if self.turns == "all" else answers[-1:]:
            prompt = render(self.tokenizer, messages[:index], tools, prompt=True)
            begin = self._begin(text, messages, index, tools, prompt)
            if begin >= limit:
                break
            begin, stop, end = self._borders(text, begin, len(text.rstrip()))
            if text[begin:stop].strip() != messages[index]["content"].strip():  # else it is plain where the turn ends
                alone = render(self.tokenizer, messages[: index + 1], tools)
                start = self._begin(alone, messages[: index + 1], index, tools, prompt)
                start, alone_stop, _ = self._borders(alone, start, len(alone.rstrip()))
                if not alone[start:alone_stop].endswith(text[begin:stop]):
                    raise Dropped("unproven", f"message {index + 1} has no end of turn of its own")
            if begin == stop:  # the template has dropped all of it, as some do with earlier turns' reasoning
                continue
            for call in messages[index].get("tool_calls", []):
                if call["function"]["name"] not in text[begin:stop] and call.get("id", PROBE) not in text[begin:stop]:
                    raise Dropped("template_rejects", "the template does not show tool calls")
            spans.append((begin, end))
        return spans

    def _begin(self, text: str, messages: list[dict], index: int, tools: list[dict] | None, prompt: str) -> int:
        """Where in `text`, the rendering of `messages`, the turn `index` begins, which `prompt` asks for. Raises Dropped.

        The prompt is what `text` begins with, except that a template may open a think block there, or an empty one, which it does
        not show later.
        Where it has rewritten what precedes the turn, another text put in the turn's place shows where the two part; right
        before that stands what the prompt ends with.
        """
        openings = [prompt + self._header]
        if self._asks and prompt.rstrip().endswith(("<think>", "</think>")):
            openings.append(PROMPT_THINK.sub("", prompt))
        for opening in openings:
            if text.startswith(opening):
                return len(opening)
        other = render(self.tokenizer, [*messages[:index], _probe(messages[index]), *messages[index + 1 :]], tools)
        differ = next((at for at, (ours, theirs) in enumerate(zip(text, other)) if ours != theirs), len(text))
        shown = other.find(PROBE, differ)
        bare = render(self.tokenizer, messages[:index], tools)
        for opening in openings:
            last = (opening[len(bare) :] if opening.startswith(bare) else "") or opening[-NEAR:]
            begin = text.rfind(last, 0, differ) + len(last)
            calls = messages[index].get("tool_calls") and not self._stop.search(other, begin, shown)
            if shown >= 0 and begin >= len(last) and (calls or SHOWN_THINK.fullmatch(other, begin, shown)):
                return begin
        raise Dropped("unproven", f"the template renders what precedes message {index + 1} in two ways")

    def _added_header(self) -> str:
        """What a template that has no generation prompt puts before every answer; blanks are the verifier's own."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        try:
            prompt, text = render(self.tokenizer, messages[:1]), render(self.tokenizer, messages)
        except RenderError:
            return ""
        header = text[len(prompt) : text.find(PROBE)]
        return header if text.startswith(prompt) and header.strip() else ""

    def _borders(self, text: str, begin: int, limit: int) -> tuple[int, int, int]:
        """Of a turn that begins at `begin`: where its own text begins and ends, and where its end-of-turn token ends."""
        found = self._stop.search(text, begin)
        stop, end = found.span() if found and found.start() <= limit else (limit, limit)
        if empty := EMPTY_THINK.match(text, begin, stop):
            begin = empty.end()
        return begin, stop, end

    def _by_offsets(self, text: str, spans: list[tuple[int, int]], encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
        """ids and mask from the characters of each token."""
        ids = np.array(encoding.ids, np.int32)
        mask = np.zeros(len(ids), np.uint8)
        for begin, end in spans:
            first, last = encoding.char_to_token(begin), encoding.char_to_token(end - 1)
            if first is None or last is None:
                raise Dropped("unproven", "the tokenizer drops text at a turn's border")
            while last + 1 < len(ids) and encoding.token_to_chars(last + 1)[0] < end:  # bytes of one character
                last += 1
            split = encoding.token_to_chars(first)[0] != begin or encoding.token_to_chars(last)[1] != end
            if split or not self._same_prompt(text, begin, ids[:first]):
                raise Dropped("unproven", "a token lies across a turn's border")
            mask[first : last + 1] = 1
        return ids, mask

    def _same_prompt(self, text: str, begin: int, ids: np.ndarray) -> bool:
        """Whether the prompt alone has the tokens that it has in the row: its last ones may merge with what follows."""
        special = 0  # where the last special token before the turn stands: tokens do not merge across it
        for found in self._special.finditer(text, max(0, begin - HEADER), begin):
            special = found.start()
        tail = text[special:begin]
        expected = self._tails.get(tail) or self.tokenizer.encode(tail, add_special_tokens=False)
        if len(tail) <= HEADER:
            self._tails[tail] = expected
        return ids[len(ids) - len(expected) :].tolist() == expected

    def _by_pieces(self, text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """ids and mask from a tokenizer that knows no characters: its pieces must be the whole."""
        borders = [0, *(border for span in spans for border in span), len(text)]
        pieces = [self.tokenizer.encode(text[a:b], add_special_tokens=False) for a, b in pairwise(borders)]
        ids = np.array([token for piece in pieces for token in piece], np.int32)
        if ids.tolist() != self.tokenizer.encode(text, add_special_tokens=False):
            raise Dropped("unproven", "a token lies across a turn's border")
        return ids, np.repeat(np.arange(len(pieces), dtype=np.uint8) % 2, [len(piece) for piece in pieces])


def _with_reasoning(message: dict) -> dict:
    """Reasoning that stands in the content, in the field where such a template looks for it alone."""
    found = message["role"] == "assistant" and not message.get("reasoning_content") and WHOLE_THINK.match(message["content"])
    return {**message, "reasoning_content": found[1].strip("\n"), "content": found[2]} if found else message


def _probe(message: dict) -> dict:
    """The same turn with a text that no verifier generates, in its content and the names of its tool calls."""
    calls = [{**call, "function": {**call["function"], "name": PROBE}} for call in message.get("tool_calls", [])]
    return {"role": "assistant", "content": PROBE} | ({"tool_calls": calls} if calls else {})


def _any_of(texts: list[str]) -> re.Pattern:
    return re.compile("|".join(map(re.escape, sorted(set(texts), key=len, reverse=True))) or r"(?!)")


def _strings(value: object) -> Iterator[str]:
    """All texts in an answer: its content, its reasoning, what its tool calls say."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _strings(item)


def _arguments_as_text(messages: list[dict]) -> list[dict]:
    def as_text(call: dict) -> dict:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]} if message.get("tool_calls") else message
        for message in messages
    ]
