"""Temporary folders: gone with their process, whichever way it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from store.files import scratch

HOLD = "import sys; from store.files import scratch\nwith scratch('ours') as folder: print(folder, flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def hold(temporary) -> subprocess.Popen:
    """A process that has a folder until its input ends."""
    env = os.environ | {"TMPDIR": str(temporary)}
    return subprocess.Popen([sys.executable, "-c", HOLD], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_scratch_folder_goes_with_its_process(temporary):
    (temporary / "ours-and-a-file").touch()
    with hold(temporary) as lives, hold(temporary) as dies:
        kept, left = (process.stdout.readline().strip() for process in (lives, dies))
        assert os.path.isdir(left) and kept != left
        dies.send_signal(signal.SIGKILL)
        dies.wait()
        with scratch("ours") as folder:
            assert {str(path) for path in temporary.iterdir()} == {kept, str(folder), str(temporary / "ours-and-a-file")}
            (folder / "socket").touch()
        lives.stdin.close()
        lives.wait()
    assert [path.name for path in temporary.iterdir()] == ["ours-and-a-file"]
