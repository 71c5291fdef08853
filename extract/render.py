"""Conversations as the verifier reads them: its tokenizer, its chat template, the tokens that end its turn."""

from __future__ import annotations

import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from configs.command import PlainError
from configs.schema import Verifier
from store.verifier import find_file

ANSWER = "THEANSWEROFTHEVERIFIER"  # stands for an answer where only what follows it is wanted


class RenderError(PlainError, ValueError):
    """A template that cannot render a conversation, or a verifier without a template; the message is one line."""


def load_tokenizer(verifier: Verifier) -> PreTrainedTokenizerBase:
    """The verifier's tokenizer, the switches of its chat template set. Raises RenderError: none there, or it has no chat template."""
    find_file(verifier.path, "tokenizer_config.json")  # tells a missing folder from an unreachable hub
    try:
        tokenizer = AutoTokenizer.from_pretrained(verifier.path, trust_remote_code=verifier.trust_remote_code)
    except (OSError, ValueError) as error:
        raise RenderError(f"{verifier.path}: tokenizer cannot be loaded ({_one_line(error)})") from None
    if not tokenizer.chat_template:
        raise RenderError(f"{verifier.path}: the tokenizer has no chat template")
    switches = "".join(f"{{%- set {name} = {json.dumps(value)} -%}}" for name, value in verifier.template.items())
    if isinstance(tokenizer.chat_template, dict):  # a template for tools beside the default, say
        tokenizer.chat_template = {name: switches + template for name, template in tokenizer.chat_template.items()}
    else:
        tokenizer.chat_template = switches + tokenizer.chat_template
    return tokenizer


def stop_ids(verifier: Verifier, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end the verifier's turn: those of generation_config.json, and the tokenizer's."""
    file = find_file(verifier.path, "generation_config.json")
    ends = json.loads(Path(file).read_text()).get("eos_token_id") if file else None
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    return frozenset(ends if tokenizer.eos_token_id is None else [*ends, tokenizer.eos_token_id])


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict], tools: list[dict] | None = None, prompt: bool = False) -> str:
    """The conversation as text; with `prompt` also what makes the verifier answer next. Raises RenderError."""
    try:
        if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:  # some bring their own
            return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
        template = tokenizer.get_chat_template(tools=tools)  # what that method does, but its look-ups only once
        return render_jinja_template([messages], tools, None, template, add_generation_prompt=prompt, **_special_tokens(tokenizer))[0][0]
    except Exception as error:  # a template is foreign code: what it raises on a strange conversation is its verdict
        raise RenderError(_one_line(error)) from None


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """Token ids after which the verifier answers. Raises RenderError."""
    return tokenizer.encode(render(tokenizer, messages, tools, prompt=True), add_special_tokens=False)


def between_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict], user: dict, last_id: int) -> list[int]:
    """Token ids that stand between the verifier's answer to `messages` and its answer to `user`, the next turn.

    The answer's own tokens are the truth and are not rendered again; `last_id` is the last of them, so that the end of the
    turn is not written twice. Raises RenderError.
    """
    text = render(tokenizer, [*messages, {"role": "assistant", "content": ANSWER}, user], prompt=True)
    if text.count(ANSWER) != 1:
        raise RenderError("the template does not show the answers of earlier turns as they were given")
    ids = tokenizer.encode(text.partition(ANSWER)[2], add_special_tokens=False)
    return ids[1:] if ids[:1] == [last_id] else ids


def assistant_message(tokenizer: PreTrainedTokenizerBase, response: list[int]) -> dict:
    """What the verifier said as a message, its reasoning apart where it closes it with a token of its own."""
    end = tokenizer.convert_tokens_to_ids("</think>")
    cut = response.index(end) + 1 if end in response and end != tokenizer.unk_token_id else 0
    thought, content = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (response[:cut], response[cut:]))
    message = {"role": "assistant", "content": content.lstrip("\n") if cut else content}
    thought = thought.removeprefix("<think>").removesuffix("</think>").strip("\n")
    return message | ({"reasoning_content": thought} if thought else {})


def marks_generation(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template says itself what the verifier generates ({% generation %})."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None


def generated_spans(tokenizer: PreTrainedTokenizerBase, messages: list[dict], tools: list[dict] | None = None) -> list[tuple[int, int]]:
    """Character ranges of `render` that the template marks as generated."""
    template = tokenizer.get_chat_template(tools=tools)
    texts, spans = render_jinja_template(
        [messages], tools, chat_template=template, return_assistant_tokens_mask=True, **_special_tokens(tokenizer)
    )
    if texts[0] != render(tokenizer, messages, tools):
        raise RenderError("the template's own marks belong to another text")
    return [(start, stop) for start, stop in spans[0]]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits of everything that turns text into ids."""
    ids = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(ids.encode()).hexdigest()[:16]


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits of everything that turns messages into text."""
    template = json.dumps([tokenizer.chat_template, tokenizer.special_tokens_map], sort_keys=True)
    return hashlib.sha256(template.encode()).hexdigest()[:16]


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    return tokenizer.special_tokens_map


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
