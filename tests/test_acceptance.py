"""Rules of acceptance: against an enumeration of a small random model (F7), and against what an engine's loop really does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tiny import write_recipe
from transformers import AutoModelForCausalLM, LlamaConfig

from configs.load import load
from extract.hf import HFVerifier
from train.acceptance import survival, verify
from train.contract import DraftContract
from train.decode import Sampler, speculate
from train.draft import Draft, initialise
from train.simulate import expected_walk, simulate, walk
from train.verifier import FrozenVerifier

VOCAB, BLOCK = 3, 3
RULES = ("greedy", "standard", "greedy_drafts", "block")


@pytest.fixture(scope="module")
def model():
    """q and p: the verifier's and the draft's distribution after every prefix of up to BLOCK tokens."""
    random = np.random.default_rng(7)
    prefixes = [prefix for size in range(BLOCK + 1) for prefix in itertools.product(range(VOCAB), repeat=size)]
    return tuple({prefix: random.dirichlet([0.7] * VOCAB) for prefix in prefixes} for _ in range(2))


def one_hot(distribution):
    return np.eye(VOCAB)[distribution.argmax()]


def sides(model, rule):
    """What the two sides of a rule draw from."""
    q, p = model
    q = {prefix: one_hot(values) for prefix, values in q.items()} if rule == "greedy" else q
    p = {prefix: one_hot(values) for prefix, values in p.items()} if rule in ("greedy", "greedy_drafts") else p
    return q, p


def engine_law(model, rule) -> dict:
    """P(accepted drafts, emitted tokens), every draft path enumerated, by the definitions of the rules."""
    q, p = sides(model, rule)
    law: dict = {}
    for drafts in itertools.product(range(VOCAB), repeat=BLOCK):
        drawn = np.prod([p[drafts[:k]][drafts[k]] for k in range(BLOCK)])
        if drawn == 0:
            continue
        ratio = [q[drafts[:k]][drafts[k]] / p[drafts[:k]][drafts[k]] for k in range(BLOCK)]
        scale = [1.0] * (BLOCK + 1)
        if rule == "block":
            for k in range(BLOCK):
                scale[k + 1] = min(1.0, scale[k] * ratio[k])
            left = [np.maximum(scale[k] * q[drafts[:k]] - p[drafts[:k]], 0).sum() for k in range(BLOCK)]
            accept = [left[k] / (left[k] + 1 - scale[k]) for k in range(1, BLOCK)] + [scale[BLOCK]]
            exactly = [0.0] * (BLOCK + 1)
            for n in range(BLOCK, 0, -1):
                exactly[n] = accept[n - 1] * np.prod([1 - value for value in accept[n:]])
            exactly[0] = 1 - sum(exactly)
        else:
            at_least = np.cumprod([1.0, *np.minimum(1, ratio)])
            exactly = [*(at_least[:-1] - at_least[1:]), at_least[-1]]
        for n, chance in enumerate(exactly):
            prefix = drafts[:n]
            rest = q[prefix] if n == BLOCK else np.maximum(scale[n] * q[prefix] - p[prefix], 0)
            if chance > 1e-15:
                for token in range(VOCAB):
                    key = (n, (*prefix, token))
                    law[key] = law.get(key, 0) + drawn * chance * rest[token] / rest.sum()
    return law


def path_survival(model, rule, path) -> list[float]:
    """s_0 .. s_{B+1} along a path that is long enough."""
    q, p = sides(model, rule)
    q_path = torch.tensor([q[path[:k]][path[k]] for k in range(BLOCK)])
    p_path = torch.tensor([p[path[:k]][path[k]] for k in range(BLOCK)])
    hit = torch.tensor([model[1][path[:k]].argmax() == path[k] for k in range(BLOCK)])
    return [1.0, *survival(rule, hit, p_path, q_path).tolist(), 0.0]


@pytest.mark.parametrize("rule", RULES)
def test_f7_path_estimator_is_the_engines_law(model, rule):
    q, _ = sides(model, rule)
    law = engine_law(model, rule)
    assert sum(law.values()) == pytest.approx(1)
    expected = 0.0
    for path in itertools.product(range(VOCAB), repeat=BLOCK):
        chance = np.prod([q[path[:k]][path[k]] for k in range(BLOCK)])
        if chance:
            expected += chance * sum(path_survival(model, rule, path)[1:])
    assert expected == pytest.approx(sum(n * value for (n, _), value in law.items()), abs=1e-12)
    for (n, emitted), value in law.items():
        path = (*emitted, *(0,) * BLOCK)[: BLOCK + 1]
        chance = np.prod([q[path[:k]][path[k]] for k in range(n + 1)])
        s = path_survival(model, rule, path) if chance else [0.0] * (BLOCK + 2)
        assert value == pytest.approx(chance * (s[n] - s[n + 1]), abs=1e-12)


def test_f7_product_of_overlaps_is_something_else(model):
    q, p = model
    biased = 0.0
    for path in itertools.product(range(VOCAB), repeat=BLOCK):
        overlaps = [np.minimum(q[path[:k]], p[path[:k]]).sum() for k in range(BLOCK)]
        biased += np.prod([q[path[:k]][path[k]] for k in range(BLOCK)]) * np.cumprod(overlaps).sum()
    assert abs(biased - sum(n * value for (n, _), value in engine_law(model, "standard").items())) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_verify_draws_by_the_law(model, rule):
    q, p = sides(model, rule)
    generator, rows = torch.Generator().manual_seed(1), 40_000
    drafts, p_rows = torch.zeros(rows, 0, dtype=torch.long), []
    for _ in range(BLOCK):
        p_rows.append(torch.tensor(np.array([p[tuple(row)] for row in drafts.tolist()])))
        drafts = torch.cat((drafts, torch.multinomial(p_rows[-1], 1, generator=generator)), 1)
    q_rows = torch.tensor(np.array([[q[tuple(row[:k])] for k in range(BLOCK + 1)] for row in drafts.tolist()]))
    accepted, following = verify(rule, drafts, torch.stack(p_rows, 1), q_rows, generator)
    seen: dict = {}
    for row, n, token in zip(drafts.tolist(), accepted.tolist(), following.tolist()):
        seen[n, (*row[:n], token)] = seen.get((n, (*row[:n], token)), 0) + 1
    law = {key: value for key, value in engine_law(model, rule).items() if value > 1e-12}
    assert set(seen) <= set(law)
    if len(law) > 1:
        assert chisquare([seen.get(key, 0) for key in law], [rows * value for value in law.values()]).pvalue > 1e-3


def test_block_verification_accepts_most(model):
    mean = {rule: sum(n * value for (n, _), value in engine_law(model, rule).items()) for rule in RULES}
    assert mean["block"] > mean["standard"]


def test_expected_walk_is_the_mean_of_walks():
    random = np.random.default_rng(0)
    survives = np.sort(random.random((12, 4)))[:, ::-1]
    for row in range(12):
        survives[row, 12 - row :] = 0  # the text ends there
    runs = [walk(survives, random) for _ in range(4000)]
    assert all(sum(run) == 12 for run in runs)
    lengths = np.array([len(run) for run in runs])
    expected = expected_walk(survives)
    assert abs(lengths.mean() - expected.forwards) < 3 * lengths.std() / 4000**0.5
    assert lengths.var() == pytest.approx(expected.variance, rel=0.1)
    assert (expected.visits * expected.emitted).sum() == pytest.approx(12)


TINY = 6


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    """A verifier of six tokens, and a random draft for it."""
    folder = tmp_path_factory.mktemp("six")
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    torch.manual_seed(0)
    ids = dict(bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)
    config = LlamaConfig(**shape, **ids, vocab_size=TINY, max_position_embeddings=64)
    verifier = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in verifier.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    verifier.save_pretrained(folder / "verifier")
    recipe = load(write_recipe(folder, folder / "verifier", {"draft": {"block_size": 3, "mask_token_id": 5, "markov_rank": 2}}))
    draft = Draft(DraftContract.resolve(recipe))
    initialise(draft, 0)
    draft.markov_head.markov_w1.weight.data *= 100
    draft.markov_head.markov_w2.weight.data *= 20
    return (
        HFVerifier(str(folder / "verifier"), "float64", draft.spec.taps),
        draft,
        FrozenVerifier.load(str(folder / "verifier"), torch.float32, torch.device("cpu")),
    )


@pytest.mark.parametrize("rule", RULES[1:])
def test_sampled_loop_has_the_verifiers_distribution(loop, rule):
    verifier, draft, frozen = loop
    rows, length, temperature = 3000, 3, 0.8
    sampler = Sampler(rule, temperature, torch.Generator().manual_seed(3))
    answers = [tuple(result.response_ids) for result in speculate(verifier, draft, frozen, [[1, 2]] * rows, length, sampler)]
    texts = list(itertools.product(range(TINY), repeat=length))
    last = torch.stack(verifier.prefill([[1, 2, *text] for text in texts]))[:, 1:-1, -1]
    q = (frozen.logits(last.float()) / temperature).softmax(-1).gather(-1, torch.tensor(texts)[..., None]).squeeze(-1).prod(1).double()
    expected, seen = (q / q.sum() * rows).numpy(), np.array([answers.count(text) for text in texts])
    rare = expected < 5
    if rare.any():
        expected, seen = np.append(expected[~rare], expected[rare].sum()), np.append(seen[~rare], seen[rare].sum())
    assert chisquare(seen, expected).pvalue > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_closed_loop_has_the_expected_mean(loop, rule):
    """Given the text, forwards of the loop minus their exact expectation have mean zero and a known variance."""
    verifier, draft, frozen = loop
    sampler = Sampler(rule, 1.0, torch.Generator().manual_seed(5))
    prompts = [[1 + row % 4, 2] for row in range(120)]
    excess, variance, accepted = 0.0, 0.0, 0
    for prompt, result in zip(prompts, speculate(verifier, draft, frozen, prompts, 16, sampler)):
        text = prompt + result.response_ids
        (response,) = simulate(draft, frozen, text, [(2, len(text))], verifier.prefill([text])[0].float(), rule, 1.0)
        expected = expected_walk(response.survival)
        excess += len(result.emitted) - expected.forwards
        variance += expected.variance
        accepted += sum(result.accepted)
    assert accepted > 20
    assert abs(excess) <= 3 * variance**0.5 + 1e-9
