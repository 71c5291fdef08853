"""Contracts: equal digests exactly where nothing differs, and differences that read well. And what `store` may import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from store.contract import ContractMismatch, DataContract, StateContract, differences, require_same

STATE = {"verifier": "v1", "taps": [1, 3], "last": "pre_norm", "dtype": "bfloat16", "engine": {"name": "vllm", "tp": 8, "chunked": False}}
CHANGES = [
    ({"verifier": "v2"}, "verifier: v1 here, v2 there"),
    ({"taps": [1, 2]}, "taps: (1, 3) here, (1, 2) there"),
    ({"last": "post_norm"}, "last: pre_norm here, post_norm there"),
    ({"dtype": "float32"}, "dtype: bfloat16 here, float32 there"),
    ({"engine": {"name": "vllm", "tp": 4, "chunked": False}}, "engine.tp: 8 here, 4 there"),
    ({"engine": {"name": "vllm", "tp": 8}}, "engine.chunked: False here, nothing there"),
    ({"engine": {"name": "vllm", "tp": 8, "chunked": 0}}, "engine.chunked: False here, 0 there"),
]


@pytest.mark.parametrize(("change", "clause"), CHANGES)
def test_every_field_counts(change, clause):
    ours, theirs = StateContract(**STATE), StateContract(**STATE | change)
    assert differences(ours, theirs) == [clause]
    assert ours.digest() != theirs.digest()
    with pytest.raises(ContractMismatch, match=r"^the extractor: "):
        require_same(ours, theirs, "the extractor")


def test_equal_contracts_survive_json():
    ours = StateContract(**STATE)
    theirs = StateContract.model_validate_json(ours.model_dump_json())
    assert not differences(ours, theirs) and ours.digest() == theirs.digest() and len(ours.digest()) == 32
    other_order = StateContract(**STATE | {"engine": dict(reversed(STATE["engine"].items()))})
    assert other_order.digest() == ours.digest()
    require_same(ours, theirs, "nowhere")


def test_data_contract():
    ours = DataContract(tokenizer="t", template="m", length=512, seed=0, filters={"min_supervised": 16})
    theirs = ours.model_copy(update={"seed": 1, "filters": {"min_supervised": 8}})
    assert differences(ours, theirs) == ["filters.min_supervised: 16 here, 8 there", "seed: 0 here, 1 there"]


@pytest.mark.parametrize("taps", [[], [3, 1], [1, 1]])
def test_taps_ascend(taps):
    with pytest.raises(ValidationError, match="ascending"):
        StateContract(**STATE | {"taps": taps})


BLOCKED = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2].split(","):
            raise ImportError(f"{name} is on the other side")
sys.meta_path.insert(0, Wall())
for module in sys.argv[1].split(","):
    __import__(f"store.{module}")
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("modules", "blocked"),
    [
        ("objects,local,contract,verifier", "torch,numpy,vllm,mooncake,transformers,datasets,huggingface_hub,train,extract,slurm"),
        ("sample,cache", "vllm,mooncake,transformers,datasets,httpx,starlette,uvicorn,huggingface_hub,train,extract,slurm"),
    ],
)
def test_imports_neither_side(modules, blocked):
    root = Path(__file__).parent.parent
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED, modules, blocked], env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    sources = "".join(file.read_text() for file in (root / "store").glob("*.py"))
    assert "torch.distributed" not in sources
