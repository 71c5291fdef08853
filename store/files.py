"""Files that processes share: there as a whole, or not at all; locked by one of them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A new folder "NAME-…" beside other temporary files. It is removed in the end; what killed processes left, by the next."""
    for left in Path(tempfile.gettempdir()).glob(f"{name}-*"):
        with suppress(OSError), _opened(left) as folder:  # another user's, or removed meanwhile
            if try_lock(folder):
                shutil.rmtree(left)
    hidden = Path(tempfile.mkdtemp(prefix=f".{name}-"))
    with _opened(hidden) as folder:
        try_lock(folder)
        path = hidden.rename(hidden.with_name(hidden.name[1:]))  # locked before anybody looks for it
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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
