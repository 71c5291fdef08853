"""Files that processes share: there as a whole, or not at all; locked by one of them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to, which takes its place in the end; whoever else writes it has another one."""
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def try_lock(file: IO | int) -> bool:
    """Take the lock of an open file or folder, which ends with the processes that have it open; False where another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write(path: Path, text: str) -> None:
    with appearing(path) as partial:
        partial.write_text(text)
