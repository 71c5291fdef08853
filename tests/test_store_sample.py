"""A sample on its way: complete or invisible, and whatever is not what was asked for is refused with its cause."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from store import sample
from store.contract import ContractMismatch, StateContract
from store.local import LocalStore
from store.objects import Full, Lost, Torn
from store.sample import MAX_PARTS, all_finite, bytes_of, checksum, discard, examine, fetch, publish, put_sample, put_slice

NAME = "run/0/7/0"
TOKENS = [5, 6, 7, 8, 9, 10]


def contract(**changes) -> StateContract:
    fields = {"verifier": "v1", "taps": (1, 3), "last": "pre_norm", "dtype": "bfloat16", "engine": {"name": "transformers"}}
    return StateContract(**fields | changes)


def states(tokens: int = len(TOKENS), dtype=torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, 3, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path, 1 << 20)


def ship(store, made: torch.Tensor, name: str = NAME, tokens=TOKENS, under: StateContract | None = None) -> None:
    slices = [put_slice(store, name, part, piece, part * 2) for part, piece in enumerate(made.split(2))]
    publish(store, name, under or contract(), tokens, slices[::-1])  # the order of arrival means nothing


def test_states_land_in_a_view_of_the_packed_batch(store):
    made, batch = states(), torch.full((10, 3, 4), 9.0, dtype=torch.bfloat16)
    ship(store, made)
    manifest = fetch(store, NAME, contract(), TOKENS, batch[2:8])
    assert torch.equal(batch[2:8], made) and (batch[:2] == 9).all() and (batch[8:] == 9).all()
    assert manifest.token_ids == TOKENS and len(manifest.slices) == 3
    discard(store, NAME, manifest)
    assert store.usage().keys == 0


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_any_cut_into_slices_is_the_same_sample(tmp_path_factory, data, dtype):
    tokens = data.draw(st.integers(1, 40))
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens), max_size=8)) - {tokens})
    store, made, out = LocalStore(tmp_path_factory.mktemp("s"), 1 << 20), states(tokens, dtype), states(tokens, dtype, seed=1)
    bounds = list(zip([0, *cuts], [*cuts, tokens], strict=True))
    slices = [put_slice(store, NAME, part, made[a:b], a) for part, (a, b) in enumerate(bounds)]
    ours = contract(dtype=str(dtype).removeprefix("torch."))
    publish(store, NAME, ours, list(range(tokens)), data.draw(st.permutations(slices)))
    fetch(store, NAME, ours, list(range(tokens)), out)
    assert torch.equal(out, made)


@pytest.mark.parametrize("alone", [0, sample.ALONE])  # examined in another thread, or in this one
@pytest.mark.parametrize("rows", [1, 4, 5, 6, 100])
def test_a_sample_goes_in_pieces_and_leaves_none_where_it_fails(store, tmp_path, monkeypatch, rows, alone):
    monkeypatch.setattr(sample, "ALONE", alone)
    made, out = states(), states(seed=1)
    size = made[0].nbytes
    monkeypatch.setattr(sample, "PIECE", rows * size)
    put_sample(store, NAME, contract(), TOKENS, made)
    manifest = fetch(store, NAME, contract(), TOKENS, out)
    assert torch.equal(out, made) and [piece.bytes for piece in manifest.slices[:-1]] == [rows * size] * ((len(made) - 1) // rows)
    discard(store, NAME, manifest)
    made[-1] = float("nan")
    with pytest.raises(Torn, match="not finite"):
        put_sample(store, NAME, contract(), TOKENS, made)
    small = LocalStore(tmp_path / "small", made.nbytes - 1)
    with pytest.raises(Full):
        put_sample(small, NAME, contract(), TOKENS, states())
    assert store.usage().keys == small.usage().keys == 0


def test_invisible_until_published_and_discarded_whole(store):
    for part in range(MAX_PARTS):
        put_slice(store, NAME, part, states(1), part)
    with pytest.raises(Lost):
        fetch(store, NAME, contract(), TOKENS, states())
    discard(store, NAME)  # no manifest tells how many there are
    assert store.usage().keys == 0
    with pytest.raises(ValueError, match="outside"):
        put_slice(store, NAME, MAX_PARTS, states(1), 0)


def refused(store, cause: str, tokens=TOKENS) -> str:
    with pytest.raises(Torn) as caught:
        fetch(store, NAME, contract(), tokens, states(seed=1))
    assert caught.value.cause == cause
    return str(caught.value)


def objects(tmp_path):
    return tmp_path / "run%2F0%2F7%2F0%2F1", tmp_path / "run%2F0%2F7%2F0%2Fmanifest"


def test_cut_object(store, tmp_path):
    ship(store, states())
    file, _ = objects(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    assert "0/1: 47 bytes" in refused(store, "size")


def test_torn_object(store, tmp_path):
    ship(store, states())
    file, _ = objects(tmp_path)
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    file.write_bytes(data)
    assert refused(store, "checksum") == f"{NAME}/1: checksum differs"


def test_overwritten_object(store, tmp_path):
    """Finite states of the right size, of another sample."""
    ship(store, states())
    ship(store, states(seed=5), name="run/0/8/0")
    (tmp_path / "run%2F0%2F8%2F0%2F1").rename(objects(tmp_path)[0])
    refused(store, "checksum")


@pytest.mark.parametrize("alone", [0, sample.ALONE])
def test_nothing_stays_of_what_cannot_be_examined(store, alone, monkeypatch):
    monkeypatch.setattr(sample, "ALONE", alone)
    monkeypatch.setattr(sample, "examine", lambda states: bytearray(-1))
    for put in (lambda: put_slice(store, NAME, 0, states(), 0), lambda: put_sample(store, NAME, contract(), TOKENS, states())):
        with pytest.raises(ValueError, match="negative"):
            put()
        assert store.usage().keys == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", ["raw", "fp8"])
@pytest.mark.parametrize("alone", [0, sample.ALONE])
def test_not_finite(store, value, codec, alone, monkeypatch):
    monkeypatch.setattr(sample, "ALONE", alone)
    made = states()
    made[4, 1, 2] = value
    with pytest.raises(Torn) as caught:
        put_slice(store, NAME, 0, made, 0, codec)
    assert caught.value.cause == "non_finite" and store.usage().keys == 0
    with monkeypatch.context() as patch:  # a writer that does not look, and does not say that it has
        patch.setattr(sample, "all_finite", lambda states: True)
        patch.setattr(sample, "examine", lambda states: (checksum(bytes_of(states)), True))
        piece = put_slice(store, NAME, 0, made, 0, codec).model_copy(update={"finite": False})
        publish(store, NAME, contract(codec=codec), TOKENS, [piece])
    with pytest.raises(Torn) as caught:
        fetch(store, NAME, contract(codec=codec), TOKENS, states(seed=1))
    assert caught.value.cause == "non_finite"


def test_what_the_writer_has_looked_at_is_not_looked_at_again(store, monkeypatch):
    """Equal bytes are as finite: the checksum covers the proof."""
    ship(store, states())
    monkeypatch.setattr(sample, "all_finite", None)
    monkeypatch.setattr(sample, "examine", None)
    fetch(store, NAME, contract(), TOKENS, out := states(seed=1))
    assert torch.equal(out, states())


def test_other_tokens(store):
    ship(store, states(), tokens=[5, 6, 7, 8, 9, 11])
    refused(store, "tokens")


def test_manifest_of_another_sample(store, tmp_path):
    ship(store, states())
    ship(store, states(seed=5), name="run/0/8/0")
    (tmp_path / "run%2F0%2F8%2F0%2Fmanifest").rename(objects(tmp_path)[1])
    refused(store, "tokens")


def test_other_contract_names_what_differs(store):
    ship(store, states(), under=contract(taps=(1, 2), engine={"name": "transformers", "prefix_caching": True}))
    with pytest.raises(ContractMismatch) as caught:
        fetch(store, NAME, contract(), TOKENS, states())
    assert str(caught.value) == f"states of {NAME}: engine.prefix_caching: nothing here, True there; taps: (1, 3) here, (1, 2) there"


def test_missing_slice_is_lost(store, tmp_path):
    ship(store, states())
    objects(tmp_path)[0].unlink()
    with pytest.raises(Lost, match="0/1"):
        fetch(store, NAME, contract(), TOKENS, states())


def test_other_width(store):
    ship(store, states())
    with pytest.raises(Torn) as caught:
        fetch(store, NAME, contract(), TOKENS, torch.empty(6, 3, 5, dtype=torch.bfloat16))
    assert caught.value.cause == "size"


@pytest.mark.parametrize("bad", ["cut", "flipped", "gap", "overlap", "bytes"])
def test_torn_manifest(store, tmp_path, bad):
    ship(store, states())
    _, file = objects(tmp_path)
    text = file.read_bytes()
    manifest = json.loads(text.partition(b"\n")[2])
    if bad == "gap":
        del manifest["slices"][1]
    if bad == "overlap":
        manifest["slices"][1]["start"] = 1
    if bad == "bytes":
        manifest["slices"][1]["bytes"] = 24
    if bad in ("gap", "overlap", "bytes"):  # by a writer that is wrong, not by an accident
        body = json.dumps(manifest).encode()
        text = b"%016x\n%s" % (checksum(body), body)
    file.write_bytes({"cut": text[:-9], "flipped": text.replace(b'"start":2', b'"start":3')}.get(bad, text))
    refused(store, "size" if bad == "bytes" else "torn")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["fp8", "fp8_all"])
def test_fp8_lands_in_its_own_rows(store, codec, dtype):
    made = torch.randn(200, 3, 37, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 3)[:, None]
    made[7, 0], made[8, 1, 5] = 0, 1e5  # a plane of zeros, an outlier
    made, batch, tokens = made.to(dtype), torch.full((210, 3, 37), 9.0, dtype=dtype), list(range(200))
    ours = contract(codec=codec, dtype=str(dtype).removeprefix("torch."))
    cuts = [0, 1, 66, 200]
    slices = [put_slice(store, NAME, part, made[a:b], a, codec) for part, (a, b) in enumerate(pairwise(cuts))]
    publish(store, NAME, ours, tokens, slices)
    fetch(store, NAME, ours, tokens, batch[3:203])
    planes = 3 if codec == "fp8_all" else 2
    values = made[:, :planes].float()
    scales = values.abs().amax(-1, keepdim=True) / 448
    scales[scales == 0] = 1
    expected = ((values / scales).to(torch.float8_e4m3fn).float() * scales).to(dtype)
    got = batch[3:203]
    assert torch.equal(got[:, :planes], expected) and torch.equal(got[:, planes:], made[:, planes:])
    assert (batch[:3] == 9).all() and (batch[203:] == 9).all()
    error = (got - made).float().norm(dim=-1) / made.float().norm(dim=-1).clamp_min(1e-30)
    assert error.max() < 0.04
    assert sum(piece.bytes for piece in slices) == 200 * (planes * 41 + (3 - planes) * 37 * dtype.itemsize)


def test_slices_of_another_codec_are_not_published(store):
    with pytest.raises(ValueError, match="by codec raw, the contract says fp8"):
        publish(store, NAME, contract(codec="fp8"), TOKENS, [put_slice(store, NAME, 0, states(), 0)])


def test_publish_refuses_slices_that_are_not_the_sample(store):
    piece = put_slice(store, NAME, 0, states(4), 0)
    with pytest.raises(ValueError, match=r"\[\(0, 4\)\] do not cover 6 tokens"):
        publish(store, NAME, contract(), TOKENS, [piece])
    with pytest.raises(ValueError, match="do not cover"):
        publish(store, NAME, contract(), [], [])


def test_unfit_out_is_refused(store):
    ship(store, states())
    for out, why in [
        (torch.empty(6, 4, 3, dtype=torch.bfloat16).transpose(1, 2), "not contiguous"),
        (torch.empty(12, 3, 4, dtype=torch.bfloat16)[::2], "not contiguous"),
        (torch.empty(6, 3, 4, dtype=torch.bfloat16, device="meta"), "meta"),
        (torch.empty(6, 3, 4), "float32"),
        (torch.empty(5, 3, 4, dtype=torch.bfloat16), r"\[5, 3, 4\]"),
        (torch.empty(6, 12, dtype=torch.bfloat16), r"\[6, 12\]"),
    ]:
        with pytest.raises(ValueError, match=why):
            fetch(store, NAME, contract(), TOKENS, out)
    with pytest.raises(ValueError, match="not contiguous"):
        put_slice(store, NAME, 9, states().transpose(1, 2), 0)


def test_full_reaches_the_producer(tmp_path):
    store = LocalStore(tmp_path, 100)
    put_slice(store, NAME, 0, states(4), 0)
    with pytest.raises(Full):
        put_slice(store, NAME, 1, states(2), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64])
def test_bytes_are_not_copied(dtype):
    tensor = torch.zeros(2, 3, dtype=dtype)
    view = bytes_of(tensor)
    view[:] = b"\x01" * view.nbytes
    assert view.nbytes == tensor.nbytes and (tensor.view(torch.uint8) == 1).all()


@given(st.lists(st.floats(width=32), min_size=1, max_size=9))
def test_all_finite(values):
    tensor = torch.tensor(values)
    assert all_finite(tensor) == bool(tensor.isfinite().all())
    assert examine(tensor) == (checksum(bytes_of(tensor)), all_finite(tensor))
    assert all_finite(tensor.bfloat16()) == bool(tensor.bfloat16().isfinite().all())


def test_examined_in_pieces(monkeypatch):
    monkeypatch.setattr(sample, "EXAMINED", 64)
    for last in (1.0, float("nan")):
        values = torch.cat((torch.randn(1000), torch.tensor([last])))
        assert examine(values) == (checksum(bytes_of(values)), last == 1.0)
