"""Start roles, watch them, end them all: what the launcher does with its table of roles, whatever the roles are."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.schema import Launch
from slurm.role import adopt_orphans, sweep
from slurm.running import AWAITED, ON_TERMINAL, STOP, STOP_SLACK_S, Failed, Role, Running, say

AGAIN_LINES = 10  # of a role that goes on
LOOK_S = 5.0  # between looks at a service that has been ready
SETTLE_S = 0.5  # scancel ends roles and tells the launcher, in any order
REMIND_S = 5.0  # between warnings of a job, which may not have been able to hear the first one


@dataclass(frozen=True)
class Outcome:
    """How roles ended: done, stopped by a signal, out_of_time (SIGUSR1 said so), or failed: which one first, and why."""

    state: Literal["done", "stopped", "out_of_time", "failed"]
    status: int  # for the launcher to exit with
    reason: str = ""
    role: str = ""
    log: str = ""


class Stopped(Exception):
    """The launcher was told to stop by a signal; by SIGUSR1 where no job has begun, or one has not ended in time."""

    def __init__(self, signum: int):
        self.state, self.status = "out_of_time" if signum == signal.SIGUSR1 else "stopped", 128 + signum
        super().__init__(f"stopped by {signal.Signals(signum).name}")


def run_roles(
    roles: Sequence[Role], logs: Path, launch: Launch, inherit: Sequence[int] = (), tell: Callable[..., None] = lambda state, **more: None
) -> Outcome:
    """Run all roles to the end of the jobs.

    Writes `logs/ROLE.log` (appended to, with one line at the start of each launch). When this returns no descendant of
    this process is alive. Takes over this process's signals for good. `inherit`: file descriptors that every role keeps.
    `tell` hears that all is "starting", "running", and then "stopping" for a `reason`. SIGUSR1 says that time is running out:
    jobs get `launch.checkpoint_s`.
    """
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)  # taken by `_Roles.pause` alone: nothing interrupts the cleanup
    logs.mkdir(parents=True, exist_ok=True)
    running = _Roles(logs, launch, inherit)
    try:
        tell("starting")
        for role in roles:
            if role.ready:
                running.start(role)
        running.wait_ready()
        tell("running")
        for role in roles:
            if not role.ready:
                running.start(role)
        running.wait_jobs()
        running.stop()
        return Outcome("out_of_time" if running.warned else "done", 0)
    except Stopped as stopped:
        say(f"{stopped}; stopping all roles")
        tell("stopping", reason=str(stopped))
        running.stop(jobs_first=True)  # they may write a checkpoint
        return Outcome(stopped.state, stopped.status, str(stopped))
    except Failed as failure:
        say(f"{failure}; stopping all roles")
        tell("stopping", reason=str(failure), role=failure.running.role.name)
        running.stop()
        say(f"{failure}; the end of {failure.running.log}:\n{failure.running.tail()}")
        return Outcome("failed", failure.status, str(failure), failure.running.role.name, str(failure.running.log))
    finally:
        if left := sweep():
            say(f"cannot be killed: processes {left}")


class _Roles:
    """All roles that were started."""

    def __init__(self, logs: Path, launch: Launch, inherit: Sequence[int]):
        self.logs, self.launch, self.inherit = logs, launch, inherit
        self.started: list[Running] = []
        self.warned = self.reminded = 0.0  # when SIGUSR1 came, and when jobs were last told so

    def start(self, role: Role) -> None:
        self.started.append(Running(role, self.logs, self.launch.grace_s, self.inherit))

    def jobs(self) -> list[Running]:
        return [running for running in self.started if not running.role.ready and running.process.returncode is None]

    def pause(self, seconds: float = 0.2) -> None:
        """Wait for a moment, or until something ends; start again what may be. Raises Stopped or Failed."""
        received = signal.sigtimedwait(AWAITED, seconds)
        for running in self.started:
            running.echo()
        if received and received.si_signo in STOP:
            raise Stopped(received.si_signo)
        if received and received.si_signo == signal.SIGUSR1:
            self.warned = self.warned or time.monotonic()
        for running in list(self.started):
            if failure := running.failure() or self._silent(running):
                self._replace(failure)
        if self.warned:
            self._hurry()

    def _hurry(self) -> None:
        """Have jobs write a checkpoint and end. Raises Stopped where none has begun, or after launch.checkpoint_s."""
        now = time.monotonic()
        if all(running.role.ready for running in self.started) or now - self.warned > self.launch.checkpoint_s:
            raise Stopped(signal.SIGUSR1)
        if now - self.reminded > REMIND_S:
            self.reminded = now
            for running in self.jobs():
                running.tell(signal.SIGUSR1)

    def _silent(self, running: Running) -> Failed | None:
        """Look whether a service is ready or, later, alive: how it fails to be, if for too long. It has been killed then."""
        role, now = running.role, time.monotonic()
        if not running.ready:
            missing, limit_s, since, what = role.ready(), self.launch.ready_s, running.began, "was not ready within"
            running.missing = missing
            if missing is None:
                running.ready = True
                say(f"{role.name} is ready after {now - running.began:.0f} s")
        elif role.alive is None or now - running.looked < LOOK_S:
            return None
        else:
            missing, limit_s, since, what = role.alive(), self.launch.stuck_s, running.answered, "has not answered for"
        running.looked = time.monotonic()
        if missing is None:
            running.answered = running.looked
            return None
        if now - since < limit_s:
            return None
        running.kill()
        return Failed(running, f"{what} {limit_s:g} s ({missing})", 1)

    def _replace(self, failure: Failed) -> None:
        """Start the role of `failure` once more, or do without. Raises `failure` where neither may be, Stopped where it is no wonder."""
        old, role, place = failure.running, failure.running.role, self.started.index(failure.running)
        if received := signal.sigtimedwait(STOP, SETTLE_S):
            raise Stopped(received.si_signo)
        again = old.started <= role.restarts
        left = sum(running.role.enough is not None for running in self.started) - 1
        if not again and (role.enough is None or left < role.enough):
            raise failure
        sweep(keep={running.process.pid for running in self.started if running is not old})
        role.forget()
        what = f"started again ({old.started} of {role.restarts})" if again else f"going on with the other {left}"
        say(f"{failure}; {what}; the end of {old.log}:\n{old.tail(AGAIN_LINES)}")
        self.started[place : place + 1] = [Running(role, self.logs, self.launch.grace_s, self.inherit, old.started + 1)] * again

    def wait_ready(self) -> None:
        """Wait until all services are ready, watching all of them. Raises Stopped or Failed."""
        begin, announced, interval = time.monotonic(), 0.0, 1 if ON_TERMINAL else 10
        while unready := [running for running in self.started if not running.ready]:
            self.pause()
            if (waited := time.monotonic() - begin) >= announced + interval:
                announced = waited
                text = f"waiting for {unready[0].role.name}, {waited:.0f} s of {self.launch.ready_s:g} s: {unready[0].missing}"
                say(text, end="" if ON_TERMINAL else "\n")

    def wait_jobs(self) -> None:
        """Wait until all jobs have ended well. Raises Stopped or Failed."""
        while self.jobs():
            self.pause()

    def stop(self, jobs_first: bool = False) -> None:
        """Tell all roles to stop, kill them after the grace or at the next signal to the launcher."""
        for group in [self.jobs(), self.started] if jobs_first else [self.started]:
            for running in group:
                running.tell(signal.SIGUSR2)  # a wrapper's SIGTERM; srun's own would kill at once
            end = time.monotonic() + self.launch.grace_s + STOP_SLACK_S
            while any(running.process.poll() is None for running in group) and time.monotonic() < end:
                received = signal.sigtimedwait(AWAITED, 0.2)
                for running in self.started:
                    running.echo()
                if received and received.si_signo in STOP:
                    say("told to stop once more; killing what is left")
                    return self._kill()
        self._kill()

    def _kill(self) -> None:
        for running in self.started:
            if running.role.step:
                running.kill()
        sweep()
        for running in self.started:
            running.echo()
