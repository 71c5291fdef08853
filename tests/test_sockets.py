"""Folders of sockets: gone with their process, whichever way it ends; nothing else is touched."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from extract import sockets
from extract.sockets import socket_folder

HOLD = "import sys; from extract.sockets import socket_folder\nwith socket_folder() as folder: print(folder, flush=True); sys.stdin.read()"


@pytest.fixture
def temporary(monkeypatch):
    """A folder for temporary files whose path is short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def hold(temporary) -> subprocess.Popen:
    """A process that has a folder until its input ends."""
    env = os.environ | {"TMPDIR": str(temporary)}
    return subprocess.Popen([sys.executable, "-c", HOLD], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def bind(folder: str | Path) -> None:
    """As vLLM does, by a name of 36 characters."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/{uuid.uuid4()}")


def test_a_folder_goes_with_its_process(temporary):
    with hold(temporary) as lives, hold(temporary) as dies:
        kept, left = (process.stdout.readline().strip() for process in (lives, dies))
        bind(kept)
        bind(left)
        dies.send_signal(signal.SIGKILL)
        dies.wait()
        with socket_folder() as folder:
            assert {str(path) for path in temporary.iterdir()} == {kept, str(folder)} and kept != left
            bind(folder)
        lives.stdin.close()
        lives.wait()
    assert not list(temporary.iterdir())


def test_what_is_no_socket_is_never_removed(temporary):
    with socket_folder() as folder:
        pass
    (work := folder.with_name(folder.name[:-8] + "my-work")).mkdir()
    (work / "thesis.tex").touch()
    folder.with_name(folder.name[:-8] + "a-file").touch()
    folder.with_name(folder.name[:-8] + "a-link").symlink_to(work)
    there = set(temporary.rglob("*"))
    with socket_folder() as folder:
        (folder / "notes").touch()
    assert set(temporary.rglob("*")) == there | {folder, folder / "notes"}


def test_a_long_path_is_not_used(monkeypatch):
    """A socket's path has a limit; up to it the folder is where temporary files are."""
    for length, where in ((sockets.LONGEST, None), (sockets.LONGEST + 1, "/tmp")):
        long = os.path.join("/tmp", f"{os.getpid()}-".ljust(length - 5, "x"))
        os.mkdir(long)
        monkeypatch.setattr(tempfile, "tempdir", long)
        with socket_folder() as folder:
            assert str(folder.parent) == (where or long)
            bind(folder)
        os.rmdir(long)
