"""The store on one machine: files below a byte budget that any number of processes share."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from store.files import try_lock
from store.objects import Full, Gone, Lost, Torn, Usage

LOCK = "+lock"  # quoted names hold no "+": what begins with it is ours and no object
LOCK_S = 30.0  # the lock is held for milliseconds; its holder may have been stopped


class Folder:
    """Whole files in one folder, never more than `budget` bytes of them.

    The folder is its own ledger: who wants to write adds up what is there, unfinished files at their full length, and creates
    its own file at full length before it lets go of the folder's lock. Nothing else is recorded, so nothing is wrong after a
    SIGKILL. A writer holds a lock on its unfinished file; one that nobody holds has lost its writer and is removed by the next
    process that looks.
    """

    def __init__(self, path: Path, budget: int):
        self.path, self.budget = Path(path).absolute(), budget
        with self.errors("create"):
            self.path.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, *parts: memoryview, overwrite: bool = False, evict: str | None = None) -> None:
        """Write `parts` as one file that appears at once and whole. Raises Full, Gone; ValueError where `name` is taken.

        `evict`: where room is missing, remove files of this suffix, oldest first.
        """
        final, unfinished = self.path / name, self.path / f"+{uuid.uuid4().hex}"
        size = sum(part.nbytes for part in parts)
        with self.errors(name):
            with self._locked():
                self._make_room(name, size, evict)
                file = unfinished.open("xb", buffering=0)
                fcntl.flock(file, fcntl.LOCK_EX)
                file.truncate(size)
            try:
                with file:
                    for part in parts:
                        while part:
                            part = part[file.write(part) :]
                    with self._locked():  # a file that is renamed while another process adds up could be missed
                        if not overwrite and final.exists():
                            raise ValueError(f"{final}: exists; a name is used once")
                        unfinished.rename(final)
            except BaseException:
                with suppress(OSError):
                    unfinished.unlink()
                raise

    def usage(self) -> Usage:
        with self.errors("usage"), self._locked():
            files = self._files()
        return Usage(sum(not name.startswith("+") for _, name, _ in files), sum(size for *_, size in files), self.budget)

    def clear(self, prefix: str) -> None:
        """Remove all files whose names begin with `prefix`, and those whose writers have gone."""
        with self.errors(prefix), self._locked():
            for _, name, _ in self._files():
                if name.startswith(prefix):
                    (self.path / name).unlink(missing_ok=True)

    def _make_room(self, name: str, size: int, evict: str | None) -> None:
        files = sorted(self._files())
        free = self.budget - sum(used for *_, used in files)
        old = [file for file in files if evict and file[1].endswith(evict)]
        if free + sum(used for *_, used in old) >= size:
            for _, victim, used in old:
                if free < size:
                    (self.path / victim).unlink(missing_ok=True)
                    free += used
        if free < size:
            hint = "" if size <= self.budget else ": it can never fit, the budget is too small"
            raise Full(f"{name}: {size} bytes, {max(free, 0)} of {self.budget} free in {self.path}{hint}")

    def _files(self) -> list[tuple[int, str, int]]:
        """(time of writing, name, bytes) of every file, after orphans are removed. The lock is held."""
        files = []
        for entry in os.scandir(self.path):
            with suppress(FileNotFoundError):  # removed meanwhile, which needs no lock
                if entry.name == LOCK or not entry.is_file(follow_symlinks=False):
                    continue
                if entry.name.startswith("+") and _orphan(entry.path):
                    os.unlink(entry.path)
                    continue
                stat = entry.stat()
                files.append((stat.st_mtime_ns, entry.name, stat.st_size))
        return files

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Between processes and between threads: each holder opens the lock file anew. Raises Gone after LOCK_S."""
        with open(self.path / LOCK, "ab") as lock:
            deadline = time.monotonic() + LOCK_S
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    raise Gone(f"{self.path}: another process has held its lock for {LOCK_S:.0f} s")
                time.sleep(0.001)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough where a fork has inherited the descriptor

    @contextmanager
    def errors(self, name: str) -> Iterator[None]:
        """The operating system's errors in the store's terms."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Full(f"{name}: {self.path} is on a file system without room ({error.strerror})") from None
            if isinstance(error, FileNotFoundError) and self.path.is_dir():
                raise Lost(f"{name}: not in {self.path}") from None
            raise Gone(f"{name}: {self.path} cannot be used ({error.strerror})") from None


class LocalStore:
    """`ObjectStore` on files. Names become flat file names ("a/b" is "a%2Fb"): there are no folders to leave behind."""

    def __init__(self, path: Path, budget: int):
        self._folder = Folder(path, budget)

    def put(self, name: str, data: memoryview) -> None:
        self._folder.write(_file_name(name), memoryview(data).cast("B"))

    def replace(self, name: str, data: bytes) -> None:
        self._folder.write(_file_name(name), memoryview(data), overwrite=True)

    def read(self, name: str) -> bytes:
        with self._folder.errors(name):
            return (self._folder.path / _file_name(name)).read_bytes()

    def read_into(self, name: str, out: memoryview) -> int:
        with self._folder.errors(name), open(self._folder.path / _file_name(name), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != out.nbytes or not fill(file, out):
                raise Torn(f"{name}: {size} bytes in the store, {out.nbytes} expected", cause="size")
            return size

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with self._folder.errors(name):
                (self._folder.path / _file_name(name)).unlink(missing_ok=True)

    def remove_run(self, run: str) -> None:
        self._folder.clear(_file_name(run))

    def register(self, memory: memoryview) -> None:
        """Files are read into any memory."""

    def usage(self) -> Usage:
        return self._folder.usage()

    def close(self) -> None:
        """Nothing is held between calls."""


def fill(file, out: memoryview) -> bool:
    """Read from an unbuffered `file` until `out` is full; False where the file ends before."""
    while out:
        got = file.readinto(out)
        if not got:
            return False
        out = out[got:]
    return True


def _file_name(name: str) -> str:
    quoted = quote(name, safe="")
    if quoted in ("", ".", "..") or len(quoted) > 255:
        raise ValueError(f"{name!r}: not an object's name (1 to 255 bytes when quoted)")
    return quoted


def _orphan(path: str) -> bool:
    with open(path, "rb+") as file:
        return try_lock(file)
