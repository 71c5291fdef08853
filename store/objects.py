"""What a store of whole objects promises, whoever keeps the bytes: `local` files here, Mooncake on a cluster."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from configs.command import PlainError
from configs.schema import Store


class StoreError(PlainError):
    """A store did not do what it was asked; `cause` is one word for metrics and for the HTTP protocol."""

    cause = "store"


class Lost(StoreError):
    """The object is not there: make it again."""

    cause = "lost"


class Full(StoreError):
    """No room now: wait, then try again."""

    cause = "no_room"


class Gone(StoreError):
    """The store itself does not answer."""

    cause = "store_gone"


class Torn(StoreError):
    """What was read is not what was written: never train on it. The cause is more exact where it is known."""

    cause = "torn"

    def __init__(self, message: str, cause: str = "torn"):
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class Usage:
    """Objects that can be read, the bytes they and unfinished puts take, and the bytes that there are."""

    keys: int
    bytes: int
    budget: int


class ObjectStore(Protocol):
    """Whole objects under names such as "run/rank/sequence/attempt/part". An object is complete or invisible.

    Every call returns or raises within seconds: waiting for room is the caller's loop. Any process and thread may call.
    """

    def put(self, name: str, data: memoryview) -> None:
        """Store `data` (flat bytes, not empty). A name is used once: ValueError where it is taken. Raises Full, Gone."""

    def replace(self, name: str, data: bytes) -> None:
        """Store a small object, or put it whole in the place of the old one. Raises Full, Gone."""

    def read(self, name: str) -> bytes:
        """A small object, such as a manifest. Raises Lost, Gone."""

    def read_into(self, name: str, out: memoryview) -> int:
        """Read an object into `out` (flat, writable bytes) without another copy; returns its size.

        Raises Lost, Gone, and Torn where the object's size is not `out`'s.
        """

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects in the order given; missing ones are fine. Only an object's consumer removes it. Raises Gone."""

    def remove_run(self, run: str) -> None:
        """Remove all objects whose name begins with `run`: for who knows that none of its processes is left. Raises Gone."""

    def register(self, memory: memoryview) -> None:
        """Say once that objects will be put from or read into `memory`, which lives until `close`. RDMA needs that, files do not."""

    def usage(self) -> Usage: ...

    def close(self) -> None:
        """Let go of the store; calls after that raise Gone."""


def run_prefix(run_dir: Path) -> str:
    """What the names of all objects of a run begin with, whichever of its processes made them: of the run's folder."""
    return hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12] + "-"


def open_store(config: Store, share: float = 0.0) -> ObjectStore:
    """This process's client of the store that `config` describes. Open one in each process, after any fork. Raises Gone.

    `share`: of each sample's bytes, what this process will put. Where puts stay in memory of whoever puts (Mooncake), so much of
    the store's budget is set aside here.
    """
    if config.kind == "mooncake":
        from store.mooncake import MooncakeStore

        return MooncakeStore(config, share)
    from store.local import LocalStore

    return LocalStore(config.path, config.bytes)
