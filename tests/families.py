"""Small verifiers without weights for tests: byte-level BPE tokenizers with the special tokens and chat templates of known families."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from configs.schema import Verifier

HERE = Path(__file__).parent
# Words as GPT-4-like tokenizers cut them: newlines after punctuation and runs of newlines stay together.
MODERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FAMILIES = {  # template: (bos, end of turn, other special tokens, other ends of turn, pre-tokenizer)
    "chatml": ("<|im_start|>", "<|im_end|>", [], [], "gpt2"),
    "marked": ("<|im_start|>", "<|im_end|>", [], [], "modern"),
    "qwen3": ("<|im_start|>", "<|im_end|>", ["<|endoftext|>"], ["<|endoftext|>"], "modern"),
    "llama3": (
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|end_of_text|>"],
        ["<|eom_id|>", "<|end_of_text|>"],
        "modern",
    ),
    "mistral": (
        "<s>",
        "</s>",
        ["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        [],
        "gpt2",
    ),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ["<｜User｜>", "<｜Assistant｜>"], [], "modern"),
    "kimi": ("[BOS]", "<|im_end|>", ["[EOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"], ["[EOS]"], "modern"),
}
THINKING = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # added, but not special


@cache
def _trained(words: str) -> str:
    """A byte-level BPE of 1,000 tokens, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(MODERN), "isolated")
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        if words == "modern"
        else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    tokenizer.normalizer = normalizers.NFC() if words == "modern" else None
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    texts = [json.loads(line)["turns"][0] for line in (HERE.parent / "configs" / "demo_prompts.jsonl").read_text().splitlines()]
    tokenizer.train_from_iterator([*texts, "\n\n".join(texts), "\n\n\n    \n" * 50], trainer)
    return tokenizer.to_str()


def make_verifier(folder: Path, family: str, **template) -> Verifier:
    """Write tokenizer, template and configs of a family to `folder`, and name it as a verifier."""
    bos, end, special, ends, words = FAMILIES[family]
    tokenizer = Tokenizer.from_str(_trained(words))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in dict.fromkeys([bos, end, *special])])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in THINKING])
    chat_template = (HERE / "templates" / f"{family}.jinja").read_text().rstrip("\n")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=end, chat_template=chat_template)
    wrapped.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(wrapped)}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrapped.convert_tokens_to_ids([end, *ends])}))
    return Verifier(path=str(folder), **template)


def generated(family: str, messages: list[dict]) -> list[str]:
    """What the verifier would generate in each turn, as the template shows it, written down by hand for each family."""
    last_user = max(index for index, message in enumerate(messages) if message["role"] == "user")
    last_answer = max((i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls")), default=-1)
    end = FAMILIES[family][1]
    texts = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        content, reasoning = message["content"], message.get("reasoning_content", "")
        calls = [(c["function"]["name"], json.dumps(c["function"]["arguments"], ensure_ascii=False)) for c in message.get("tool_calls", [])]
        if family == "qwen3":
            shown = f"<think>\n{reasoning.strip(chr(10))}\n</think>\n\n" if reasoning and index > last_user else ""
            shown += content.lstrip("\n") if index > last_user and (reasoning or index == len(messages) - 1) else content
            for number, (name, arguments) in enumerate(calls):
                shown += "\n" if number or content else ""
                shown += f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        elif family == "llama3":
            shown = content.strip()
            if calls:
                shown = f'{{"name": "{calls[0][0]}", "parameters": {calls[0][1]}}}'
        elif family == "mistral":
            shown = " " + content
            if calls:
                each = [f'{{"name": "{name}", "arguments": {given}}}' for name, given in calls]
                shown = f"[TOOL_CALLS] [{', '.join(each)}]"
        elif family == "deepseek":
            shown = content
            if calls:
                each = [
                    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{given}\n```<｜tool▁call▁end｜>" for name, given in calls
                ]
                shown += f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"
        elif family == "kimi":
            shown = (f"<think>{reasoning}</think>" if reasoning and index >= last_answer else "") + content
            if calls:
                each = [f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{given}<|tool_call_end|>" for name, given in calls]
                shown += f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"
        else:
            shown = content
        if shown:
            texts.append(shown + ("<|eom_id|>" if family == "llama3" and calls else end))
    return texts
