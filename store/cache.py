"""The durable cache: states that outlive the run that made them, for other epochs, evaluation and other runs."""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from pathlib import Path

from torch import Tensor

from store.contract import StateContract
from store.local import Folder, fill
from store.objects import Lost, Torn, Usage
from store.sample import checksum, examine, states_view

SUFFIX = ".states"
HEADER = struct.Struct("<QQ")  # bytes of the states, their checksum


class DurableCache:
    """Files named by (state contract, token ids), below a byte budget; the oldest leave first. Any processes may share one.

    A file appears whole, so a SIGKILL at any moment leaves a valid cache. What is corrupt all the same (a disk, a power cut) is
    a miss and is removed. Streaming never deletes from here.
    """

    def __init__(self, path: Path, budget_bytes: int):
        self._folder = Folder(path, budget_bytes)

    def get_into(self, contract: StateContract, token_ids: list[int], out: Tensor) -> bool:
        """Read the states into `out` [T, m+1, H]; False: they are not there, and `out` may hold rubbish.

        Raises Gone; ValueError where `out` is unfit (not contiguous, not on the CPU, another dtype or length).
        """
        view = states_view(contract, token_ids, out)
        path = self._path(contract, token_ids)
        try:
            with self._folder.errors(path.name), path.open("rb", buffering=0) as file:
                whole = os.fstat(file.fileno()).st_size == HEADER.size + view.nbytes
                header = file.read(HEADER.size)
                if whole and fill(file, view) and header == HEADER.pack(view.nbytes, checksum(view)):
                    return True
                path.unlink(missing_ok=True)
        except Lost:
            pass
        return False

    def has(self, contract: StateContract, token_ids: list[int]) -> bool:
        """Whether the states are there, without reading them (what is corrupt is found by `get_into`)."""
        return self._path(contract, token_ids).exists()

    def put(self, contract: StateContract, token_ids: list[int], states: Tensor) -> None:
        """Keep `states` [T, m+1, H]; the oldest files make room. Raises Full (they never fit), Gone, Torn (not finite)."""
        view = states_view(contract, token_ids, states)
        path = self._path(contract, token_ids)
        if path.exists():
            return
        check, finite = examine(states)
        if not finite:
            raise Torn("states to keep are not finite", cause="non_finite")
        header = HEADER.pack(view.nbytes, check)
        self._folder.write(path.name, memoryview(header), view, overwrite=True, evict=SUFFIX)

    def usage(self) -> Usage:
        return self._folder.usage()

    def _path(self, contract: StateContract, token_ids: list[int]) -> Path:
        key = hashlib.sha256(contract.digest().encode() + array("q", token_ids).tobytes())
        return self._folder.path / f"{key.hexdigest()}{SUFFIX}"
