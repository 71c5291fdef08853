"""Process trees of tests: start them, find all that belongs to them, wait for their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from slurm.roles import environment


class Tree:
    """Processes of one test, known by a variable in their environment that every descendant inherits."""

    def __init__(self):
        self.mark = f"LAUNCH_TEST={uuid.uuid4().hex}"
        self.env = environment(1) | dict([self.mark.split("=")])

    def python(self, *arguments: str | Path) -> subprocess.Popen:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.Popen(command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def role(self, *command: str | Path, grace: float = 10) -> subprocess.Popen:
        return self.python("-m", "slurm.role", "--grace", str(grace), "--", *command)

    def alive(self) -> dict[int, str]:
        """Command line of each process of this test that is no zombie."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes() and ") Z" not in (folder / "stat").read_text():
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended meanwhile, or not ours
                continue
        return found

    def pid(self, end: str, wrapper: bool = False) -> int:
        """The process whose command line ends like this, or the wrapper of that; waits until there is one."""
        return wait_for(lambda: [pid for pid, line in self.alive().items() if line.endswith(end) and ("slurm.role" in line) == wrapper])[0]

    def assert_gone(self, seconds: float = 5) -> None:
        """Nothing of this test runs any more, or will in a moment; kills what does, so that one failure stays one."""
        end = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < end:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left


def wait_for(what, seconds: float = 20):
    end = time.monotonic() + seconds
    while not (answer := what()):
        if time.monotonic() > end:
            pytest.fail("waited in vain")
        time.sleep(0.02)
    return answer


def stop(pid: int) -> None:
    """SIGSTOP, once it has come to every thread: on a busy machine some go on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(") T" in stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")))


def end_of(process: subprocess.Popen, seconds: float = 20) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err
