"""Which tokens of a conversation the verifier would generate, proven for each row.

A turn's tokens begin where the prompt that asks for it ends, and end with the end-of-turn token. Both borders are found in
the rendering of the whole conversation, since that is what is trained on, and confirmed by the rendering that ends with the
turn. What the template adds (headers, an empty think block, the generation prompt) is not supervised. What cannot be
confirmed drops the row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from extract.conversations import Conversation, Dropped
from extract.render import RenderError, generated_spans, marks_generation, render

EMPTY_THINK = re.compile(r"\s*(<think>)?\s*</think>\n*")  # the opening tag may stand in the prompt
OPEN_THINK = re.compile(r"<think>\s*$")


@dataclass
class Supervisor:
    """Renders conversations of one verifier and finds what it would generate.

    stop_ids: tokens that end its turn; turns: "all" of the assistant's turns or the "last".
    """

    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    turns: str = "all"
    _tails: dict[str, list[int]] = field(default_factory=dict)  # ids of the texts right before a turn: few, and often asked for

    def __post_init__(self):
        stops = self.tokenizer.convert_ids_to_tokens(sorted(self.stop_ids))
        self._stop = re.compile("|".join(map(re.escape, stops)) or r"(?!)")
        self._marked = marks_generation(self.tokenizer)

    def spans(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text and the character ranges that the verifier would generate. Raises Dropped."""
        for message in conversation.messages:
            if message["role"] == "assistant" and self._stop.search(_strings(message)):
                raise Dropped("stop_in_text", "an answer contains an end-of-turn token as text")
        try:
            text = render(self.tokenizer, conversation.messages, conversation.tools)
            found = self._from_marks(text, conversation) if self._marked else self._from_prompts(text, conversation)
        except RenderError as error:
            raise Dropped("template_rejects", str(error)) from None
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Dropped("bad_utf8", "a lone surrogate") from None
        return text, found

    def _from_marks(self, text: str, conversation: Conversation) -> list[tuple[int, int]]:
        spans = []
        for start, stop in generated_spans(self.tokenizer, conversation.messages, conversation.tools):
            start, stop, end = self._borders(text, start, stop)
            if start < stop:
                spans.append((start, end))
        return spans[-1:] if self.turns == "last" else spans

    def _from_prompts(self, text: str, conversation: Conversation) -> list[tuple[int, int]]:
        messages, tools = conversation.messages, conversation.tools
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        before = None  # the turn before: the rendering that ends with it, and where it ends in `text`
        for index in answers[-1:] if self.turns == "last" else answers:
            prompt = render(self.tokenizer, messages[:index], tools, prompt=True)
            whole = render(self.tokenizer, messages[: index + 1], tools)
            begin, alone = _begin(text, prompt, before), _begin(whole, prompt, None)
            if begin is None or alone is None:
                raise Dropped("unproven", f"the template renders what precedes turn {index + 1} in two ways")
            start, stop, end = self._borders(text, begin, len(text))
            alone, alone_stop, _ = self._borders(whole, alone, len(whole))
            if not whole[alone:alone_stop].endswith(text[start:stop]):
                raise Dropped("unproven", f"turn {index + 1} does not end where its end-of-turn token stands")
            before = whole[:alone_stop], stop
            if start < stop:  # else the template has dropped all of it, as some do with earlier turns' reasoning
                spans.append((start, end))
        return spans

    def _borders(self, text: str, start: int, limit: int) -> tuple[int, int, int]:
        """Of a turn that begins at `start`: where its own text begins and ends, and where its end-of-turn token ends."""
        found = self._stop.search(text, start)
        stop, end = found.span() if found and found.start() <= limit else (limit, limit)
        if empty := EMPTY_THINK.match(text, start, stop):
            start = empty.end()
        return start, stop, end

    def mask(self, text: str, spans: list[tuple[int, int]], encoding) -> np.ndarray:
        """uint8 [T]: 1 where a token of `encoding` (of the tokenizers library, for `text`) is generated. Raises Dropped."""
        mask = np.zeros(len(encoding.ids), np.uint8)
        for start, stop in spans:
            first, last = encoding.char_to_token(start), encoding.char_to_token(stop - 1)
            if first is None or last is None:
                raise Dropped("unproven", "the tokenizer drops text at a turn's border")
            while last + 1 < len(mask) and encoding.token_to_chars(last + 1)[0] < stop:  # bytes of one character
                last += 1
            split = encoding.token_to_chars(first)[0] != start or encoding.token_to_chars(last)[1] != stop
            if split or (first and encoding.token_to_chars(first - 1)[1] > start) or not self._same_prompt(text, start, encoding, first):
                raise Dropped("unproven", "a token lies across a turn's border")
            mask[first : last + 1] = 1
        return mask

    def _same_prompt(self, text: str, start: int, encoding, first: int) -> bool:
        """Whether the prompt alone has the tokens that it has in the row: what follows it may merge with its last ones."""
        special = max((found.end() for found in self._stop.finditer(text, max(0, start - 200), start)), default=None)
        if special is None:
            return True
        tail = text[special:start]
        if tail not in self._tails:
            self._tails[tail] = self.tokenizer.encode(tail, add_special_tokens=False)
        ids = self._tails[tail]
        return encoding.ids[first - len(ids) : first] == ids


def _begin(text: str, prompt: str, before: tuple[str, int] | None) -> int | None:
    """Where in `text` the turn begins that `prompt` asks for; None: not to be said.

    A template may open a think block in the prompt that earlier turns do not show, and rewrite the turns before this one: then
    what lies between the end of the turn before and this one must be the same text in both.
    """
    for opened in (prompt, OPEN_THINK.sub("", prompt)):
        if text.startswith(opened):
            return len(opened)
        if before and opened.startswith(before[0]) and text.startswith(between := opened[len(before[0]) :], before[1]):
            return before[1] + len(between)
    return None


def _strings(value: object) -> str:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return "\n".join(map(_strings, value)) if isinstance(value, list) else str(value)
