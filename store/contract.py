"""Small records of what two sides must agree on. Whoever meets the other's data compares, and names the fields that differ."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from configs.command import PlainError


class ContractMismatch(PlainError):
    """Two sides disagree; the message names each field with both values."""


class Contract(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, file: Path):
        """Raises ContractMismatch where the file holds none, OSError."""
        try:
            return cls.model_validate_json(file.read_bytes())
        except ValidationError:
            raise ContractMismatch(f"{file}: not a {cls.__name__}") from None

    def digest(self) -> str:
        """32 hex digits that are equal exactly where the contracts are."""
        text = "\n".join(f"{field}={value!r}" for field, value in sorted(_flat(self).items()))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class StateContract(Contract):
    """What makes two states of the same tokens the same numbers."""

    verifier: str  # store.verifier.fingerprint
    taps: tuple[int, ...]  # aux ids, ascending; the last state always stands apart
    last: Literal["pre_norm", "post_norm"]  # before or after the final norm
    residual: Literal["stream", "prefix/stream"] = "stream"  # taps are prefix sums of K3's block residuals, the last state its stream
    dtype: str  # of the engine, as torch names it: "bfloat16"
    codec: Literal["raw", "fp8", "fp8_all"] = "raw"  # store.codec: what a lossy one has done to the numbers
    engine: dict[str, str | int | bool]  # the engine and those of its settings that change states

    @field_validator("taps")
    @classmethod
    def _ascending(cls, taps):
        if not taps or list(taps) != sorted(set(taps)):
            raise ValueError(f"taps must be ascending and distinct, got {list(taps)}")
        return taps


class DataContract(Contract):
    """What makes two data sets of the same conversations the same tokens."""

    tokenizer: str  # hash
    template: str  # hash
    length: int  # tokens a sample
    seed: int
    filters: dict[str, str | int | float | bool]


def differences(ours: Contract, theirs: Contract) -> list[str]:
    """One clause for each field that differs, such as "taps: (1, 2) here, (1, 3) there"."""
    here, there = _flat(ours), _flat(theirs)
    return [
        f"{field}: {here.get(field, 'nothing')} here, {there.get(field, 'nothing')} there"
        for field in sorted(here.keys() | there.keys())
        if repr(here.get(field)) != repr(there.get(field))
    ]


def require_same(ours: Contract, theirs: Contract, where: str) -> None:
    """Raise ContractMismatch, led by `where` the other contract was met, unless the two are equal."""
    if found := differences(ours, theirs):
        raise ContractMismatch(f"{where}: {'; '.join(found)}")


def _flat(contract: BaseModel) -> dict[str, object]:
    """Fields by name, those of a mapping or of a nested record as "engine.kv_dtype"."""
    flat = {}
    for field, value in contract:
        if isinstance(value, BaseModel):
            value = _flat(value)
        if isinstance(value, dict):
            flat |= {f"{field}.{key}": item for key, item in value.items()}
        else:
            flat[field] = value
    return flat
