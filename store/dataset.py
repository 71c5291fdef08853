"""A data set as data preparation leaves it: a folder that `datasets.load_from_disk` reads, too.

Read by pyarrow alone: that library takes two seconds to import, in every rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class Dataset:
    """Rows {"input_ids": int64 [T], "loss_mask": int64 [T]}, memory-mapped until they are asked for. Raises FileNotFoundError."""

    def __init__(self, folder: Path):
        files = json.loads((folder / "state.json").read_text())["_data_files"]
        table = pa.concat_tables(pa.ipc.open_stream(pa.memory_map(str(folder / file["filename"]))).read_all() for file in files)
        self.columns = {name: table.column(name) for name in ("input_ids", "loss_mask")}

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return {name: column[row].values.to_numpy().astype(np.int64) for name, column in self.columns.items()}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return map(self.__getitem__, range(len(self)))

    def tokens(self) -> int:
        """Of all rows together."""
        return pc.sum(pc.list_value_length(self.columns["input_ids"])).as_py() or 0
