"""One started role: its wrapper process, here or by srun on other nodes, and its log."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slurm.role import die_with_parent, shell_status

TAIL_LINES = 80
TAIL_BYTES = 32 << 10
STOP_SLACK_S = 5.0  # beyond the grace that each wrapper gives its command
ON_TERMINAL = sys.stderr.isatty()
HANGUP = set() if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else {signal.SIGHUP}  # ignored: nohup
STOP = {signal.SIGINT, signal.SIGTERM} | HANGUP
AWAITED = STOP | {signal.SIGCHLD, signal.SIGUSR1}


@dataclass(frozen=True)
class Role:
    """One line of the role table.

    A role with `ready` is a service: started first, awaited, and not expected to end. `ready` says what is still missing,
    None once the service does its work; it neither raises nor takes longer than a few seconds. A role without is a job:
    the launch is done when all jobs have ended well.
    """

    name: str
    command: Sequence[str]
    env: dict[str, str]
    ready: Callable[[], str | None] | None = None
    alive: Callable[[], str | None] | None = None  # of a service: what is wrong with it, once it has been ready
    forget: Callable[[], None] = lambda: None  # clears what it has left when it is gone
    restarts: int = 0  # times that it is started again
    enough: int | None = None  # of services with this field: the launch goes on while so many are left
    step: Sequence[str] = ()  # srun and its options, of a role on other nodes
    ranks: int = 0  # of the command on each node, that know of each other
    echo: bool = False  # what it prints goes to the launcher's terminal too


class Failed(Exception):
    """A role ended when it should not have, or was not ready in time."""

    def __init__(self, running: Running, reason: str, status: int):
        self.running = running
        self.status = status or 1
        super().__init__(f"{running.role.name} {reason}")


def say(text: str, end: str = "\n") -> None:
    start = "\r\x1b[K" if ON_TERMINAL else ""  # over what a progress line left
    print(f"{start}launch: {text}", file=sys.stderr, end=end, flush=True)


class Running:
    """A started role: its wrapper process and its log."""

    def __init__(self, role: Role, logs: Path, grace_s: float, inherit: Sequence[int], started: int = 1):
        self.role, self.started = role, started  # times, this one included
        self.ready = role.ready is None
        self.missing: str | None = None  # until it is
        self.began = self.looked = self.answered = time.monotonic()
        self.log = logs / f"{role.name}.log"
        with open(self.log, "ab", buffering=0) as log:  # a quick command must not write before this
            log.write(f"==> {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(role.command)}\n".encode())
            self.begin = self.shown = log.tell()
            self.process = subprocess.Popen(
                [*role.step, sys.executable, "-m", "slurm.role", "--grace", str(grace_s), "--ranks", str(role.ranks), "--", *role.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=role.env,
                pass_fds=inherit,
                start_new_session=True,  # Ctrl-C is the launcher's to handle
                preexec_fn=partial(_begin, os.getpid(), set() if role.step else AWAITED),
            )

    def echo(self) -> None:
        """Copy what is new in the log to the terminal."""
        if not self.role.echo:
            return
        with open(self.log, "rb") as log:
            log.seek(self.shown)
            new = log.read()
        self.shown += len(new)
        sys.stdout.buffer.write(new)
        sys.stdout.flush()

    def tell(self, signum: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signum)

    def kill(self) -> None:
        """The kernel kills a command with its wrapper, even if it is stopped; srun kills its tasks when it is told to end."""
        self.tell(signal.SIGTERM if self.role.step else signal.SIGKILL)
        try:
            self.process.wait(STOP_SLACK_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def failure(self) -> Failed | None:
        """How this role ended, if it should not have ended like that."""
        code = self.process.poll()
        if code is None or (code == 0 and not self.role.ready):
            return None
        return Failed(self, _reason(code), shell_status(code))

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of this launch's part of the log."""
        return "\n".join(f"  {line}" for line in last_lines(self.log, self.begin)[-lines:])


def last_lines(log: Path, begin: int = 0) -> list[str]:
    """The end of a log, of what lies behind its first `begin` bytes."""
    with open(log, "rb") as file:
        file.seek(max(begin, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()


def _begin(parent: int, blocked: set[signal.Signals]) -> None:
    """Between fork and exec: die with the launcher, not only once the wrapper's Python is up; what srun passes on it must hear."""
    die_with_parent(parent, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _reason(code: int) -> str:
    """How a wrapper with this return code ended, in words."""
    signum = shell_status(code) - 128
    if signum in set(signal.Signals):
        return f"was killed by {signal.Signals(signum).name}"
    return f"ended with status {code}"
