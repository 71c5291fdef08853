"""States and decoding of the Hugging Face verifier against Hugging Face's own forward."""

from __future__ import annotations

import pytest
import torch
from tiny import VOCAB
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config

from extract.hf import HFVerifier

TAPS = (0, 1, 3)
LENGTHS = (3, 17, 9, 1, 40, 12, 5, 8)


def rows(lengths=LENGTHS, seed=0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB - 1, (length,), generator=generator).tolist() for length in lengths]


def reference(model, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """States [T, m+1, H] by output_hidden_states and the last layer's output, and logits [T, V]."""
    last = []
    hook = model.model.layers[-1].register_forward_hook(lambda _module, _args, output: last.append(output))
    output = model(torch.tensor([token_ids]), output_hidden_states=True)
    hook.remove()
    return torch.stack([*(output.hidden_states[tap] for tap in TAPS), last[0]], dim=2)[0], output.logits[0]


def distance(states: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest L2 of the difference over L2, of any token's row."""
    assert states.shape == wanted.shape and states.dtype == wanted.dtype
    return float(((states - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request, tiny_verifier):
    path = tiny_verifier(request.param)
    return HFVerifier(str(path), "float32", TAPS), AutoModelForCausalLM.from_pretrained(path).requires_grad_(False)


def test_states_are_hugging_faces_alone_and_in_a_batch_of_eight_lengths(pair):
    verifier, model = pair
    batch = verifier.prefill(rows())
    for row, together in zip(rows(), batch):
        wanted, _ = reference(model, row)
        assert together.is_contiguous()
        assert distance(together, wanted) < 1e-5
        assert distance(verifier.prefill([row])[0], wanted) < 1e-5


def test_last_state_is_before_the_final_norm(pair):
    verifier, model = pair
    row = rows()[4]
    _, logits = reference(model, row)
    ours = model.lm_head(model.model.norm(verifier.prefill([row])[0][:, -1]))
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    assert verifier.contract.last == "pre_norm" and verifier.contract.taps == TAPS


def test_slots_decode_what_generate_does(pair):
    verifier, model = pair
    prompts = rows()
    slots, order = verifier.slots(len(prompts), 64), torch.arange(len(prompts))
    longest = max(map(len, prompts))
    padded = torch.tensor([prompt[:-1] + [0] * (longest - len(prompt)) for prompt in prompts])
    assert verifier.step(padded, slots, order, logits=False) == (None, None)
    slots.lengths[:] = torch.tensor([len(prompt) - 1 for prompt in prompts])
    tokens = torch.tensor([prompt[-1:] for prompt in prompts])
    generated = []
    for _ in range(16):
        logits, _ = verifier.step(tokens, slots, order)
        tokens = logits.argmax(-1)
        generated.append(tokens)
    for prompt, ours in zip(prompts, torch.cat(generated, 1).tolist()):
        wanted = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=16, min_new_tokens=16, do_sample=False
        )
        # `generate` forbids the end of text before min_new_tokens; ours does not know of it
        ends = [index for index, token in enumerate(ours) if token in verifier.stop_ids]
        assert ours[: ends[0] if ends else None] == wanted[0, len(prompt) :].tolist()[: ends[0] if ends else None]


def test_states_and_logits_of_steps_with_rollback(pair):
    """A rejected block leaves nothing behind: setting the length is enough, rows apart and in any order."""
    verifier, model = pair
    slots = verifier.slots(4, 64)
    sequences, rejected = rows((20, 31, 25)), rows((6, 6, 6), seed=1)
    where = torch.tensor([3, 0, 2])
    kept = []
    for start, stop in ((0, 9), (9, 12), (12, 20)):
        verifier.step(torch.tensor(rejected), slots, where)
        slots.lengths[where] = start
        kept.append(verifier.step(torch.tensor([row[start:stop] for row in sequences]), slots, where, keep_states=True))
    for index, row in enumerate(sequences):
        wanted, logits = reference(model, row[:20])
        assert distance(torch.cat([states[index] for _, states in kept]), wanted) < 1e-5
        torch.testing.assert_close(torch.cat([got[index] for got, _ in kept]), logits, rtol=1e-4, atol=1e-4)


def test_a_row_moves_and_what_was_not_finite_does_no_harm(pair):
    verifier, model = pair
    slots = verifier.slots(3, 64)
    first, second = rows((12, 15))
    verifier.step(torch.tensor([first]), slots, torch.tensor([2]))
    for cached in slots._cached[1]:
        cached[0, :, :12] = float("nan")  # as an earlier sequence would have left it
    slots.clear_row(0)
    slots.copy_row(2, 0)
    verifier.step(torch.tensor([second]), slots, torch.tensor([1]))
    logits, _ = verifier.step(torch.tensor([[7, 8], [9, 10]]), slots, torch.tensor([0, 1]))
    for got, row in zip(logits, ([*first, 7, 8], [*second, 9, 10])):
        torch.testing.assert_close(got, reference(model, row)[1][-2:], rtol=1e-4, atol=1e-4)


def test_a_full_slot_is_refused(pair):
    verifier, _ = pair
    slots = verifier.slots(2, 8)
    verifier.step(torch.tensor([[4] * 6]), slots, torch.tensor([1]))
    with pytest.raises(ValueError, match="3 new tokens make a row of 9; a slot holds 8"):
        verifier.step(torch.tensor([[4] * 3]), slots, torch.tensor([1]))


def test_a_token_takes_what_the_slots_grow_by(pair):
    verifier, _ = pair
    assert verifier.token_bytes() == 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, their size, bytes


def test_float64_is_closer_to_itself_than_float32_could_be(tiny_verifier):
    verifier = HFVerifier(str(tiny_verifier("llama")), "float64", TAPS)
    row = rows()[4]
    whole = verifier.prefill([row])[0]
    slots = verifier.slots(1, 64)
    pieces = [
        verifier.step(torch.tensor([row[start : start + 4]]), slots, torch.tensor([0]), keep_states=True)[1][0]
        for start in range(0, len(row), 4)
    ]
    assert whole.dtype == torch.float64
    assert distance(torch.cat(pieces), whole) < 1e-7  # its norms are computed in fp32, by Hugging Face's definition


@pytest.mark.parametrize("family", ["every_layer", "some_layers"])
def test_sliding_windows_are_kept_in_slots(tmp_path, family):
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB)
    config = {
        "every_layer": MistralConfig(**shape, head_dim=8, sliding_window=5),
        "some_layers": Qwen3Config(**shape, head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=2),
    }[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    model.save_pretrained(tmp_path)
    verifier = HFVerifier(str(tmp_path), "float32", TAPS)
    row = rows()[4]
    wanted, logits = reference(model, row)
    slots = verifier.slots(1, 64)
    got, states = verifier.step(torch.tensor([row]), slots, torch.tensor([0]), keep_states=True)
    assert distance(states[0], wanted) < 1e-5 and distance(verifier.prefill([row])[0], wanted) < 1e-5
    torch.testing.assert_close(got[0], logits, rtol=1e-4, atol=1e-4)


def test_a_tap_that_does_not_exist_is_refused(tiny_verifier):
    with pytest.raises(ValueError, match=r"has 4 layers, so a tap is one of 0\.\.3"):
        HFVerifier(str(tiny_verifier("llama")), "float32", (1, 4))
