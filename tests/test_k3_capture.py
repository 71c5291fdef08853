"""Kimi-K3's capture on a block bank of pure torch: what the plugin makes of vLLM's prefix sums is what teacher logits need."""

from __future__ import annotations

import pytest
import torch
from block_bank import LAYERS, BlockBank

from configs.schema import Config
from extract.k3_capture import last_from_output
from extract.obtain import StateSource
from store.contract import ContractMismatch, StateContract
from store.objects import open_store
from store.sample import publish, put_slice
from store.verifier import fingerprint
from train.handshake import from_engine, handshake
from train.verifier import FrozenVerifier

TAPS = (1, 3, 4)


class Engine:
    """An extractor around a block bank: the pool that a rank sees."""

    def __init__(self, model: BlockBank, config: Config):
        self.model, self.store = model, open_store(config.store)
        model.aux_hidden_state_layers = (*TAPS, LAYERS)
        verifier = fingerprint(config.verifier.path)
        engine = {"name": "block bank"}
        self.of = StateContract(verifier=verifier, taps=TAPS, last="pre_norm", residual="prefix/stream", dtype="float32", engine=engine)

    def contract(self) -> StateContract:
        return self.of

    def complete(self, token_ids: list[int], max_tokens: int) -> tuple[list[int], str]:
        return self.model.greedy(token_ids, max_tokens), "length"

    def make(self, name: str, token_ids: list[int]) -> None:
        piece = put_slice(self.store, name, 0, self.model.states(token_ids), 0)
        publish(self.store, name, self.of, token_ids, [piece])


@pytest.fixture
def config(tmp_path) -> Config:
    path = BlockBank().save(tmp_path / "verifier")
    return Config(
        run_dir=tmp_path / "run",
        verifier={"path": str(path), "dtype": "float32"},
        data={"path": tmp_path / "data"},
        store={"path": tmp_path / "store", "bytes": 10_000_000},
        draft={"taps": TAPS, "mask_token_id": 0},
    )


def shake(config: Config, model: BlockBank) -> StateContract:
    source = StateSource(config, Engine(model, config))
    source.contract = source.pool.contract()
    frozen = FrozenVerifier.load(config.verifier.path, torch.float32, torch.device("cpu"))
    handshake(config, source.contract, frozen, from_engine(source, [[5, 6, 7], [8, 9]]))
    return source.contract


def plugged() -> BlockBank:
    model = type("Plugged", (BlockBank,), {})
    last_from_output(model)
    last_from_output(model)  # vLLM may load a plugin twice
    return model()


def test_the_handshake_passes_the_plugin(config):
    assert shake(config, plugged()).residual == "prefix/stream"


def test_the_handshake_fails_prefix_sums_alone(config):
    with pytest.raises(ContractMismatch, match="greedy tokens are not reproduced"):
        shake(config, BlockBank())


def test_taps_stay_prefix_sums_and_the_last_is_the_output():
    tokens = torch.arange(20)
    ours, theirs = plugged(), BlockBank()
    for model in (ours, theirs):
        model.aux_hidden_state_layers = (*TAPS, LAYERS)
    (output, captures), (_, prefixes) = ours(tokens), theirs(tokens)
    assert all(torch.equal(capture, prefix) for capture, prefix in zip(captures[:-1], prefixes[:-1]))
    assert torch.equal(captures[-1], output) and not torch.allclose(output, prefixes[-1], rtol=0.1)


@pytest.mark.parametrize("layers", [(), TAPS])
def test_who_does_not_ask_for_the_last_layer_sees_no_difference(layers):
    tokens = torch.arange(20)
    ours, theirs = plugged(), BlockBank()
    ours.aux_hidden_state_layers = theirs.aux_hidden_state_layers = layers
    assert all(torch.equal(a, b) for a, b in zip(_flat(ours(tokens)), _flat(theirs(tokens)), strict=True))


def _flat(result) -> list[torch.Tensor]:
    return [result[0], *result[1]] if isinstance(result, tuple) else [result]
