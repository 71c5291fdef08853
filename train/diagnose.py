"""Why is acceptance low? Checks that are run, not asked: `train.evaluate --diagnose`.

A draft that is read as it was trained predicts its verifier's text better than under any other reading. So other readings (taps a
layer off, another mask token, rotary base or causality) are tried on the same anchors, in pairs, and one that is better is named.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from extract.hf import HFVerifier
from extract.render import load_tokenizer, prompt_ids, template_hash
from store.dataset import Dataset
from store.verifier import text_config
from train.draft import Draft
from train.sets import Question
from train.simulate import simulate
from train.validate import spans
from train.verifier import FrozenVerifier

TEXTS, EVERY, SLOTS = 16, 3, 4  # texts looked at, tokens from one anchor to the next, slots of a block
BETTER = 0.02, 3.0  # nats a slot, and standard errors over texts, by which another reading must win
ON_POLICY = 0.95, 0.1  # share of greedy tokens that are the verifier's; nats by which sampled ones may be too unlikely
SAMPLE = 2000  # rows of the data set that are counted
GAP = 0.3  # nats a slot between trained and held-out text, or between short and long contexts
Check = tuple[str, str, str]  # name, "fine", "fault", "limit" or "not checked", what was found


@dataclass
class Text:
    """A text, its responses, and the verifier's states [T, m + 1, H] at every tap that some reading wants."""

    ids: list[int]
    spans: list[tuple[int, int]]
    states: Tensor


def diagnose(config: Config, draft: Draft, questions: list[Question]) -> dict:
    """{"faults": names, "limits": names, "checks": [{"name", "verdict", "detail"}]}. questions: answered, by rollouts where there are."""
    layers = text_config(config.verifier.path)["num_hidden_layers"]
    taps = tuple(sorted({tap for own in draft.spec.taps for tap in (own - 1, own, own + 1) if 0 <= tap < layers}))
    verifier = HFVerifier(config.verifier.path, config.verifier.dtype, taps, config.verifier.trust_remote_code)
    frozen = FrozenVerifier.load(config.verifier.path, torch.float32, torch.device("cpu"), draft.kept)
    rows = Dataset(config.data.path) if (config.data.path / "state.json").exists() else None

    def text(ids: list[int], parts: list[tuple[int, int]]) -> Text:
        return Text(ids, parts, verifier.prefill([ids])[0])

    chosen = questions[:: max(1, len(questions) // TEXTS)][:TEXTS]
    held_out = [text(q.prompt_ids + q.response_ids, [(len(q.prompt_ids), len(q.prompt_ids) + len(q.response_ids))]) for q in chosen]
    trained = []
    for row in islice(rows or (), TEXTS):
        trained.append(text(row["input_ids"].tolist(), spans(row["loss_mask"])))
    checks = [
        _norm(config, verifier, frozen, held_out[0]),
        _template(config, rows, questions),
        _policy("evaluated", config, frozen, held_out),
        _policy("training", config, frozen, trained),
        *_readings(config, draft, frozen, verifier, trained or held_out),  # what it knows best tells readings apart best
        *_data(draft, frozen, taps, held_out, trained, rows),
    ]
    found = {verdict: [name for name, said, _ in checks if said == verdict] for verdict in ("fault", "limit")}
    keys = ("name", "verdict", "detail")
    return {"faults": found["fault"], "limits": found["limit"], "checks": [dict(zip(keys, check)) for check in checks]}


def _norm(config: Config, verifier: HFVerifier, frozen: FrozenVerifier, text: Text) -> Check:
    """Does head(norm(last state)) give the model's own logits?"""
    own = verifier.model(torch.tensor([text.ids])).logits[0].float()
    clear = (top := own.topk(2, -1)).values.diff(dim=-1).abs().squeeze(-1) > config.verifier.rounding
    share = float((frozen.logits(text.states[:, -1]).argmax(-1) == top.indices[:, 0])[clear].float().mean())
    return "last state and its norm", "fine" if share > 0.98 else "fault", f"reproduce {share:.1%} of the verifier's choices"


def _template(config: Config, rows, questions: list[Question]) -> Check:
    """Are prompts rendered now, in these rollouts, and in the training data, alike?"""
    tokenizer, faults = load_tokenizer(config.verifier), []
    contract = config.data.path / "data_contract.json"
    if contract.exists() and json.loads(contract.read_text())["template"] != template_hash(tokenizer):
        faults.append("the verifier's template is not the one that the training data was rendered with")
    rendered = [question for question in questions if question.turn == 1 and question.messages]
    other = sum(prompt_ids(tokenizer, question.messages[:-1]) != question.prompt_ids for question in rendered)
    if other > len(rendered) / 10:
        faults.append(f"{other} of {len(rendered)} prompts are not what the template makes of their messages")
    if rows is not None:
        prompts = [row["input_ids"][: row["loss_mask"].argmax()].tolist() for row in islice(rows, 64)]
        ends = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*(prompt[::-1] for prompt in prompts)))
        suffix = [tokens[0] for tokens in ends][::-1]
        if suffix and (other := sum(q.prompt_ids[-len(suffix) :] != suffix for q in questions)) > len(questions) / 10:
            faults.append(f"{other} of {len(questions)} prompts do not end as those of the training data do")
    return "chat template", "fault" if faults else "fine", "; ".join(faults) or "the same in prompts and training data"


def _policy(what: str, config: Config, frozen: FrozenVerifier, texts: list[Text]) -> Check:
    """Would the verifier have said these responses?"""
    name, temperature, right, excess = f"off-policy {what} text", config.rollout.temperature, [], []
    for text in texts:
        following = torch.tensor(text.ids[1:])
        at = torch.cat([torch.arange(start - 1, stop - 1) for start, stop in text.spans if start])
        logits = frozen.logits(text.states[at, -1])
        top = logits.topk(2, -1)
        right += (top.indices[:, 0] == following[at])[top.values[:, 0] - top.values[:, 1] > config.verifier.rounding].tolist()
        log_q = (logits / (temperature or 1)).log_softmax(-1)
        entropy = -(log_q.exp() * log_q).sum(-1)
        excess.append(float((-log_q.gather(-1, following[at][:, None]).squeeze(-1) - entropy).mean()))
    if not texts:
        return name, "not checked", "no training data here"
    if temperature == 0:
        share = float(np.mean(right))
        return name, "fine" if share > ON_POLICY[0] else "fault", f"{share:.1%} of the tokens are its argmax"
    mean, error = np.mean(excess), np.std(excess) / len(excess) ** 0.5
    off = mean > ON_POLICY[1] and mean > 3 * error
    return name, "fault" if off else "fine", f"{mean:+.3f} nats a token less likely than its entropy says (error {error:.3f})"


def _readings(config: Config, draft: Draft, frozen: FrozenVerifier, verifier: HFVerifier, texts: list[Text]) -> list[Check]:
    """One check for each kind of misreading. A draft that is read wrongly in one way may look better under other wrong readings, too: so
    the best reading is taken first, and only what is better still beside it is another fault."""
    tokenizer, current, faults, first = load_tokenizer(config.verifier), draft, [], {}
    base = _score(draft, frozen, verifier.taps, texts)
    while True:
        best = {
            kind: max((_gain(label, other, base, frozen, verifier.taps, texts) for label, other in others), key=lambda gain: gain.mean)
            for kind, others in _alternatives(config, current, tokenizer, verifier.taps).items()
            if others and kind not in faults
        }
        first = {**best, **first}
        better = [kind for kind, gain in best.items() if gain.mean > BETTER[0] and gain.mean > BETTER[1] * gain.error]
        if not better:
            break
        faults.append(max(better, key=lambda kind: best[kind].mean))
        first[faults[-1]], current = best[faults[-1]], best[faults[-1]].draft
        base = base + best[faults[-1]].each
    return sorted(
        (_reading(config, draft, kind, gain, faults, texts) for kind, gain in first.items()),
        key=lambda check: faults.index(check[0]) if check[0] in faults else len(faults),
    )


def _reading(config: Config, draft: Draft, kind: str, gain: Gain, faults: list[str], texts: list[Text]) -> Check:
    """What is wrong with this kind of reading, by itself or by what the recipe and the texts say."""
    spec, wrong, detail = draft.spec, kind in faults, f"{gain.label}: {gain.mean:+.3f} nats a slot (error {gain.error:.3f})"
    if not wrong and faults and gain.mean > BETTER[0]:
        detail += f", which {faults[0]} explain{'' if faults[0].endswith('s') else 's'}"
    stated = {"taps": (spec.taps, config.draft.taps), "mask token": (spec.mask_token_id, config.draft.mask_token_id)}.get(kind)
    if stated and stated[0] != stated[1]:
        wrong, detail = True, f"{stated[0]} in the draft, {stated[1]} in the recipe; {detail}"
    used = sum(spec.mask_token_id in text.ids for text in texts)
    if kind == "mask token" and used > len(texts) / 10:
        wrong, detail = True, f"token {spec.mask_token_id} occurs in {used} of {len(texts)} texts; {detail}"
    return kind, "fault" if wrong else "fine", detail


def _alternatives(config: Config, draft: Draft, tokenizer, taps: tuple[int, ...]) -> dict[str, list[tuple[str, Draft]]]:
    """Other readings of a draft by kind, those that `taps` are there for."""
    spec = draft.spec
    attention, theta = "gqa" if spec.gqa else "mla", (spec.gqa or spec.mla).rope_theta
    rope = text_config(config.verifier.path).get("rope_parameters") or {}
    thetas = {theta / 10, theta * 10, 1e4, 1e5, 1e6, rope.get("rope_theta") or theta} - {theta}
    masks = {getattr(tokenizer, f"{name}_token_id") for name in ("mask", "pad", "eos", "bos", "unk")} | {config.draft.mask_token_id}
    shifted = [(f"taps {shift:+d}", tuple(tap + shift for tap in spec.taps)) for shift in (-1, 1)]
    shifted += [("taps in reverse order", spec.taps[::-1])]
    return {
        "taps": [(label, _with(draft, taps=other)) for label, other in shifted if set(other) <= set(taps)],
        "mask token": [(f"mask token {mask}", _with(draft, mask_token_id=mask)) for mask in masks - {None, spec.mask_token_id}],
        "rope": [
            (f"rope theta {other:g}", _with(draft, **{attention: getattr(spec, attention).model_copy(update={"rope_theta": other})}))
            for other in sorted(thetas)
        ],
        "causality of a block": [("the other causality", _with(draft, causal=not spec.reach(0)[0]))],
    }


@dataclass
class Gain:
    """How much likelier texts are under another reading: nats a slot for each text, their mean and its standard error."""

    label: str
    draft: Draft
    each: np.ndarray
    mean: float
    error: float


def _gain(label: str, other: Draft, base: np.ndarray, frozen: FrozenVerifier, taps: tuple[int, ...], texts: list[Text]) -> Gain:
    each = _score(other, frozen, taps, texts) - base
    return Gain(label, other, each, float(each.mean()), float(each.std(ddof=1) / len(each) ** 0.5) if len(each) > 1 else np.inf)


def _data(draft: Draft, frozen: FrozenVerifier, taps, held_out: list[Text], trained: list[Text], rows) -> Iterator[Check]:
    """Enough data, and contexts as long as those that are asked?"""
    if rows is None:
        yield "amount of data", "not checked", "no training data here"
        return
    ours, theirs = _score(draft, frozen, taps, held_out), _score(draft, frozen, taps, trained)
    gap, error = theirs.mean() - ours.mean(), (ours.var() / len(ours) + theirs.var() / len(theirs)) ** 0.5
    lengths, supervised = zip(*((len(row["input_ids"]), row["loss_mask"].sum()) for row in islice(rows, SAMPLE)))
    tokens, longest = np.mean(supervised) * len(rows), max(lengths)
    few = gap > GAP and gap > 3 * error
    yield "amount of data", "limit" if few else "fine", f"{tokens:,.0f} supervised tokens; trained text is {gap:+.2f} nats a slot likelier"
    beyond = [replace(text, spans=[(max(start, longest), stop) for start, stop in text.spans if stop > longest + 1]) for text in held_out]
    beyond = [text for text in beyond if text.spans]
    if not beyond:
        yield "context length", "fine", f"no text is longer than the longest of training, {longest} tokens"
        return
    loss = ours.mean() - _score(draft, frozen, taps, beyond).mean()
    detail = f"beyond {longest} tokens, the longest of training: {loss:+.2f} nats a slot lost"
    yield "context length", "fault" if loss > GAP else "fine", detail


def _with(draft: Draft, **changes) -> Draft:
    """The same weights read in another way."""
    other = copy.copy(draft)
    if not set(changes) <= {"taps", "mask_token_id"}:  # layers read the others when they are made
        other = Draft(draft.spec.model_copy(update=changes)).eval()
        other.load_state_dict(draft.state_dict())
    other.spec = draft.spec.model_copy(update=changes)
    return other


def _score(draft: Draft, frozen: FrozenVerifier, taps: tuple[int, ...], texts: list[Text]) -> np.ndarray:
    """Mean log-probability [texts] of the next tokens in the first slots; tokens that the draft cannot say are left out."""
    columns = [*(taps.index(tap) for tap in draft.spec.taps), len(taps)]
    means = []
    for text in texts:
        responses = simulate(draft, frozen, text.ids, text.spans, text.states[:, columns], every=EVERY)
        values = np.concatenate([response.log_p[:, :SLOTS].ravel() for response in responses])
        means.append(values[np.isfinite(values)].mean())
    return np.array(means)
