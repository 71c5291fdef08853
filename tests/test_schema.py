"""Recipes that cannot be: one line that names the key and what would be valid, never a traceback or a silent choice."""

from __future__ import annotations

import pytest
from tiny import write_recipe

from configs.load import ConfigError, load
from store.contract import ContractMismatch, DataContract
from store.verifier import VerifierError, text_config


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.lr", "expected key=value"),
        ("train.lr=[", r"override 'train.lr=\[': \[ is not YAML"),
        ("trian.lr=3", r"unknown key trian \(did you mean train\?\)"),
        ("train.lr.x=3", "train.lr = {'x': 3}: input should be a valid number"),
        ("train.lr=.inf", "train.lr = inf: input should be a finite number"),
        ("train.lr=.nan", "train.lr = nan"),
        ("train=3", "train = 3"),
        ("seed=-1", "seed = -1: input should be greater than or equal to 0"),
        ("evaluate.readings=[]", "at least 1 item"),
        ("extract.host=0.0.0.0", "extract.host = '0.0.0.0': trainers cannot be sent to every address"),
        ("extract.max_model_len=400", r"must exceed data.length \(400\)"),
        ("loss.terms={foo: 1}", "'ce', 'ce_argmax', 'l1' or 'tv'"),
        ("store.bytes=16GB", "store.bytes = '16GB'"),
        ("rounds.batchez=1", r"did you mean batches\?"),
    ],
)
def test_overrides(tmp_path, override, says):
    with pytest.raises(ConfigError, match=says) as error:
        load(write_recipe(tmp_path, tmp_path), [override])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "a recipe is a mapping of sections"),
        (b"a: [1\n", "not YAML"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"run_dir: a\nseed: 1\nrun_dir: b\n", "run_dir is there twice"),
        (b"train:\n  lr: 1\n  lr: 2\n", "lr is there twice"),
        (b"? [a]\n: 1\n", "not YAML"),
    ],
)
def test_files(tmp_path, content, says):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as error:
        load(path)
    assert "\n" not in str(error.value)


def test_files_that_hold_something_else(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(VerifierError, match=r"config\.json: not JSON"):
        text_config(tmp_path)
    with pytest.raises(ContractMismatch, match=r"config\.json: not a DataContract"):
        DataContract.read(tmp_path / "config.json")
