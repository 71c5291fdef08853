"""Files that other processes read: there as a whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to, which takes its place in the end; whoever else writes it has another one."""
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    with appearing(path) as partial:
        partial.write_text(text)
