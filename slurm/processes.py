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
AGAIN_LINES = 10  # of a role that goes on
LOOK_S = 5.0  # between looks at a service that has been ready
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
    alive: Callable[[], str | None] | None = None  # of a service: what is wrong with it, once it has been ready
    forget: Callable[[], None] = lambda: None  # clears what it has left when it is gone
    restarts: int = 0  # times that it is started again
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


def run_roles(roles: Sequence[Role], logs: Path, ready_s: float, grace_s: float, stuck_s: float, inherit: Sequence[int] = ()) -> int:
    """Run all roles to the end of the jobs; returns the launcher's exit status: 0, or the first failed role's, or 128 + signal.

    Writes `logs/ROLE.log` (appended to, with one line at the start of each launch). When this returns no descendant of
    this process is alive. Takes over this process's signals for good. `inherit`: file descriptors that every role keeps.
    """
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)  # taken by `_Roles.pause` alone: nothing interrupts the cleanup
    logs.mkdir(parents=True, exist_ok=True)
    running = _Roles(logs, ready_s, grace_s, stuck_s, inherit)
    try:
        for role in roles:
            if role.ready:
                running.start(role)
        running.wait_ready()
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

    def __init__(self, role: Role, logs: Path, grace_s: float, inherit: Sequence[int], started: int = 1):
        self.role, self.started = role, started  # times, this one included
        self.ready = role.ready is None
        self.missing: str | None = None  # until it is
        self.began = self.looked = self.answered = time.monotonic()
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

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of this launch's part of the log."""
        with open(self.log, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self.begin, end - TAIL_BYTES))
            text = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in text[-lines:])


class _Roles:
    """All roles that were started."""

    def __init__(self, logs: Path, ready_s: float, grace_s: float, stuck_s: float, inherit: Sequence[int]):
        self.logs, self.ready_s, self.grace_s, self.stuck_s, self.inherit = logs, ready_s, grace_s, stuck_s, inherit
        self.started: list[Running] = []

    def start(self, role: Role) -> None:
        self.started.append(Running(role, self.logs, self.grace_s, self.inherit))

    def pause(self, seconds: float = 0.2) -> None:
        """Wait for a moment, or until something ends; start again what may be. Raises Stopped or Failed."""
        received = signal.sigtimedwait(AWAITED, seconds)
        for running in self.started:
            running.echo()
        if received and received.si_signo != signal.SIGCHLD:
            raise Stopped(received.si_signo)
        for place, running in enumerate(self.started):
            if failure := running.failure() or self._silent(running):
                self.started[place] = self._again(failure)

    def _silent(self, running: Running) -> Failed | None:
        """Look whether a service is ready or, later, alive: how it fails to be, if for too long. It has been killed then."""
        role, now = running.role, time.monotonic()
        if not running.ready:
            missing, limit_s, since, what = role.ready(), self.ready_s, running.began, "was not ready within"
            running.missing = missing
            if missing is None:
                running.ready = True
                say(f"{role.name} is ready after {now - running.began:.0f} s")
        elif role.alive is None or now - running.looked < LOOK_S:
            return None
        else:
            missing, limit_s, since, what = role.alive(), self.stuck_s, running.answered, "has not answered for"
        running.looked = time.monotonic()
        if missing is None:
            running.answered = running.looked
            return None
        if now - since < limit_s:
            return None
        running.process.kill()  # and with it, by the kernel, its command, even if that is stopped
        running.process.wait()
        return Failed(running, f"{what} {limit_s:g} s ({missing})", 1)

    def _again(self, failure: Failed) -> Running:
        """The role of `failure` started once more. Raises `failure` where that has happened often enough."""
        old = failure.running
        if old.started > old.role.restarts:
            raise failure
        sweep(keep={running.process.pid for running in self.started if running is not old})
        old.role.forget()
        say(f"{failure}; started again ({old.started} of {old.role.restarts}); the end of {old.log}:\n{old.tail(AGAIN_LINES)}")
        return Running(old.role, self.logs, self.grace_s, self.inherit, old.started + 1)

    def wait_ready(self) -> None:
        """Wait until all services are ready, watching all of them. Raises Stopped or Failed."""
        begin, announced, interval = time.monotonic(), 0.0, 1 if ON_TERMINAL else 10
        while unready := [running for running in self.started if not running.ready]:
            self.pause()
            if (waited := time.monotonic() - begin) >= announced + interval:
                announced = waited
                text = f"waiting for {unready[0].role.name}, {waited:.0f} s of {self.ready_s:g} s: {unready[0].missing}"
                say(text, end="" if ON_TERMINAL else "\n")

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
