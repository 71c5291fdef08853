"""Checkpoints: a folder per step, complete or absent, and a pointer to the latest."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from configs.schema import Config
from store.contract import Contract, ContractMismatch, require_same
from store.files import write
from train.contract import DraftContract
from train.draft import Draft
from train.published import read_published


def save(
    root: Path, step: int, weights: dict, states: list[dict], contracts: dict, config: Config, rank: int = 0, best: bool = False, spare=()
) -> Path:
    """Write the state dicts of the draft (fp32) and its optimizers, contracts and recipe after a finished step. The folder appears
    whole, `latest` follows (the link `best` too, where it is), and of older ones `train.keep_checkpoints` - 1 stay, besides the best
    and those of the steps `spare`. Every rank calls this and rank 0 writes, whole tensors wherever the ranks hold parts."""
    final = root / f"step_{step:08d}"
    weights, states = _whole([weights, states], rank == 0)
    if rank > 0:
        return final
    temporary = root / f".{final.name}"
    for rest in root.glob(".step_*"):  # of writers that were killed
        shutil.rmtree(rest)
    temporary.mkdir(parents=True)
    save_file(weights, temporary / "draft.safetensors")
    torch.save(states, temporary / "optimizers.pt")
    record = {"step": step, "version": _code_version(), "config": config.model_dump(mode="json")}
    record |= {name: contract.model_dump() for name, contract in contracts.items()}
    (temporary / "checkpoint.json").write_text(json.dumps(record, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    write(root / "latest", final.name)
    if best:
        (root / ".best").unlink(missing_ok=True)
        (root / ".best").symlink_to(final.name)
        (root / ".best").replace(root / "best")
    spared = {final, (root / "best").resolve(), *(root / f"step_{step:08d}" for step in spare)}
    older = sorted(folder for folder in root.glob("step_*") if folder not in spared)
    for folder in older[: max(0, len(older) - config.train.keep_checkpoints + 1)]:
        shutil.rmtree(folder.rename(root / f".{folder.name}"))  # at no moment is half of one counted
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


def resume(folder: Path, draft: Draft, contracts: dict[str, Contract]) -> int:
    """Load weights; returns the step to go on from. Refuses a run whose draft, states, data or order of samples differ."""
    record = read_record(folder)
    for name, contract in contracts.items():
        require_same(contract, type(contract).model_validate(record[name]), f"{folder}: {name} contract")
    tensors = load_file(folder / "draft.safetensors")
    if draft.kept is not None and not torch.equal(tensors["kept"], draft.kept.cpu()):
        raise ContractMismatch(f"{folder}: its draft vocabulary is not the data set's")
    draft.load_state_dict(tensors)
    return record["step"]


def resume_optimizers(folder: Path, optimizers: list[torch.optim.Optimizer]) -> None:
    """Load their states, and lay these out as the parameters are by now."""
    for optimizer, saved in zip(optimizers, torch.load(folder / "optimizers.pt", weights_only=True), strict=True):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, state in saved["state"].items():
            like = parameters[number]
            for key, value in state.items():
                if isinstance(like, DTensor) and value.shape == like.shape:
                    state[key] = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
        optimizer.load_state_dict(saved)


def _whole(tree, keep: bool):
    """The same mapping, list or value with whole tensors in CPU memory; None in their place unless `keep`."""
    if isinstance(tree, dict):
        return {key: _whole(value, keep) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_whole(value, keep) for value in tree]
    if isinstance(tree, DTensor):
        tree = tree.full_tensor()
    return (tree.cpu().contiguous() if keep else None) if isinstance(tree, Tensor) else tree


def _code_version() -> str:
    try:
        return version("dspark-pipeline")
    except PackageNotFoundError:  # run from its sources
        return "unversioned"
