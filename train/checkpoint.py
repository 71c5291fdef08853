"""Checkpoints: a folder per step, complete or absent, and a pointer to the latest."""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from configs.schema import Config
from store.contract import ContractMismatch, DataContract, StateContract, require_same
from train.contract import DraftContract
from train.draft import Draft
from train.published import read_published


def save(root: Path, step: int, draft: Draft, optimizers: list, contracts: dict, config: Config) -> Path:
    """Write fp32 weights, optimizer states, contracts and recipe of a finished step; the folder appears whole and `latest` follows."""
    final = root / f"step_{step:08d}"
    temporary = root / f".{final.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in draft.state_dict().items()}, temporary / "draft.safetensors")
    torch.save([optimizer.state_dict() for optimizer in optimizers], temporary / "optimizers.pt")
    record = {"step": step, "version": _code_version(), "config": config.model_dump(mode="json")}
    record |= {name: contract.model_dump() for name, contract in contracts.items()}
    (temporary / "checkpoint.json").write_text(json.dumps(record, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    pointer = root / ".latest"
    pointer.write_text(final.name)
    pointer.replace(root / "latest")
    return final


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint of a run, None before the first."""
    pointer = root / "latest"
    return root / pointer.read_text() if pointer.exists() else None


def read_record(folder: Path) -> dict:
    """What a checkpoint says of itself: step, config, contracts. Raises FileNotFoundError naming what is missing."""
    for name in ("checkpoint.json", "draft.safetensors"):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder}: not a checkpoint, {name} is missing")
    return json.loads((folder / "checkpoint.json").read_text())


def load_draft(folder: Path) -> Draft:
    """The draft of a checkpoint, or a published one of either format. Raises FileNotFoundError naming what is missing, FormatError."""
    if (folder / "config.json").exists():
        return read_published(folder)
    draft = Draft(DraftContract.model_validate(read_record(folder)["draft"]))
    draft.load_state_dict(load_file(folder / "draft.safetensors"))
    return draft


def resume(folder: Path, draft: Draft, optimizers: list, contracts: dict) -> int:
    """Load weights and optimizer states; returns the step to go on from. Refuses a run whose draft, states or data differ."""
    record = read_record(folder)
    kinds = {"draft": DraftContract, "states": StateContract, "data": DataContract}
    for name, contract in contracts.items():
        require_same(contract, kinds[name].model_validate(record[name]), f"{folder}: {name} contract")
    tensors = load_file(folder / "draft.safetensors")
    if draft.kept is not None and not torch.equal(tensors["kept"], draft.kept.cpu()):
        raise ContractMismatch(f"{folder}: its draft vocabulary is not the data set's")
    draft.load_state_dict(tensors)
    for optimizer, state in zip(optimizers, torch.load(folder / "optimizers.pt", weights_only=True), strict=True):
        optimizer.load_state_dict(state)
    return record["step"]


def _code_version() -> str:
    try:
        return version("dspark-pipeline")
    except PackageNotFoundError:  # run from its sources
        return "unversioned"
