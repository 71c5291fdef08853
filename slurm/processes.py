"""Start roles, watch them, end them all: what the launcher does with its table of roles, whatever the roles are."""

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

from slurm.role import adopt_orphans, die_with_parent, sweep

TAIL_LINES = 80  # torchrun ends with about 40 of its own
TAIL_BYTES = 32 << 10
STOP_SLACK_S = 5.0  # beyond the grace that each wrapper gives its command
HANGUP = set() if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else {signal.SIGHUP}  # ignored: nohup
STOP = {signal.SIGINT, signal.SIGTERM} | HANGUP
AWAITED = STOP | {signal.SIGCHLD}
ON_TERMINAL = sys.stderr.isatty()


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
    echo: bool = False  # what it prints goes to the launcher's terminal too


class Stopped(Exception):
    """The launcher was told to stop by a signal."""

    def __init__(self, signum: int):
        self.status = 128 + signum
        super().__init__(f"stopped by {signal.Signals(signum).name}")


class Failed(Exception):
    """A role ended when it should not have, or was not ready in time."""

    def __init__(self, running: Running, reason: str, status: int):
        self.running = running
        self.status = status or 1
        super().__init__(f"{running.role.name} {reason}")


def run_roles(roles: Sequence[Role], logs: Path, ready_s: float, grace_s: float, inherit: Sequence[int] = ()) -> int:
    """Run all roles to the end of the jobs; returns the launcher's exit status: 0, or the first failed role's, or 128 + signal.

    Writes `logs/ROLE.log` (appended to, with one line at the start of each launch). When this returns no descendant of
    this process is alive. Takes over this process's signals for good. `inherit`: file descriptors that every role keeps.
    """
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)  # taken by `_Roles.pause` alone: nothing interrupts the cleanup
    logs.mkdir(parents=True, exist_ok=True)
    running = _Roles(logs, grace_s, inherit)
    try:
        for role in roles:
            if role.ready:
                running.start(role)
        running.wait_ready(ready_s)
        for role in roles:
            if not role.ready:
                running.start(role)
        running.wait_jobs()
        running.stop()
        return 0
    except Stopped as stopped:
        say(f"{stopped}; stopping all roles")
        running.stop()
        return stopped.status
    except Failed as failure:
        say(f"{failure}; stopping all roles")
        running.stop()
        say(f"{failure}; the end of {failure.running.log}:\n{failure.running.tail()}")
        return failure.status
    finally:
        if left := sweep():
            say(f"cannot be killed: processes {left}")


def say(text: str, end: str = "\n") -> None:
    start = "\r\x1b[K" if ON_TERMINAL else ""  # over what a progress line left
    print(f"{start}launch: {text}", file=sys.stderr, end=end, flush=True)


class Running:
    """A started role: its wrapper process and its log."""

    def __init__(self, role: Role, logs: Path, grace_s: float, inherit: Sequence[int]):
        self.role = role
        self.log = logs / f"{role.name}.log"
        with open(self.log, "ab") as log:
            log.write(f"==> {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(role.command)}\n".encode())
            self.begin = self.shown = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slurm.role", "--grace", str(grace_s), "--", *role.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=role.env,
                pass_fds=inherit,
                start_new_session=True,  # Ctrl-C is the launcher's to handle
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),  # not only once the wrapper's Python is up
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

    def failure(self) -> Failed | None:
        """How this role ended, if it should not have ended like that."""
        code = self.process.poll()
        if code is None or (code == 0 and not self.role.ready):
            return None
        return Failed(self, _reason(code), code if code >= 0 else 128 - code)

    def tail(self) -> str:
        """The last lines of this launch's part of the log."""
        with open(self.log, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self.begin, end - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])


class _Roles:
    """All roles that were started."""

    def __init__(self, logs: Path, grace_s: float, inherit: Sequence[int]):
        self.logs, self.grace_s, self.inherit = logs, grace_s, inherit
        self.started: list[Running] = []

    def start(self, role: Role) -> None:
        self.started.append(Running(role, self.logs, self.grace_s, self.inherit))

    def pause(self, seconds: float = 0.2) -> None:
        """Wait for a moment, or until something ends. Raises Stopped or Failed."""
        received = signal.sigtimedwait(AWAITED, seconds)
        for running in self.started:
            running.echo()
        if received and received.si_signo != signal.SIGCHLD:
            raise Stopped(received.si_signo)
        for running in self.started:
            if failure := running.failure():
                raise failure

    def wait_ready(self, ready_s: float) -> None:
        """Wait until all services are ready, watching all of them. Raises Stopped or Failed."""
        begin = time.monotonic()
        interval = 1 if ON_TERMINAL else 10
        announced = 0.0
        for running in self.started:
            while (missing := running.role.ready()) is not None:
                self.pause()
                waited = time.monotonic() - begin
                if waited > ready_s:
                    raise Failed(running, f"was not ready within {ready_s:g} s ({missing})", 1)
                if waited >= announced + interval:
                    announced = waited
                    text = f"waiting for {running.role.name}, {waited:.0f} s of {ready_s:g} s: {missing}"
                    say(text, end="" if ON_TERMINAL else "\n")
            say(f"{running.role.name} is ready after {time.monotonic() - begin:.0f} s")

    def wait_jobs(self) -> None:
        """Wait until all jobs have ended well. Raises Stopped or Failed."""
        while any(running.process.returncode is None for running in self.started if not running.role.ready):
            self.pause()

    def stop(self) -> None:
        """SIGTERM to all roles, SIGKILL after the grace or at the next signal to the launcher."""
        for running in self.started:
            if running.process.poll() is None:
                running.process.terminate()
        end = time.monotonic() + self.grace_s + STOP_SLACK_S
        while any(running.process.poll() is None for running in self.started) and time.monotonic() < end:
            received = signal.sigtimedwait(AWAITED, 0.2)
            for running in self.started:
                running.echo()
            if received and received.si_signo != signal.SIGCHLD:
                say("told to stop once more; killing what is left")
                break
        sweep()
        for running in self.started:
            running.echo()


def _reason(code: int) -> str:
    """How a wrapper with this return code ended, in words."""
    signum = -code if code < 0 else code - 128
    if signum in set(signal.Signals):
        return f"was killed by {signal.Signals(signum).name}"
    return f"ended with status {code}"
