"""Run everything that a recipe needs: `python -m slurm.launch CONFIG [key=value…] [-- COMMAND…]`.

On this machine, or with `launch.trainer_nodes` over the nodes of the Slurm allocation that it is called in: extractors on the
first ones, trainers on the rest. First `slurm.plan` looks whether the run can work; then the services start (the store's master
where there is one, the extractors), until each has answered a real request; then the trainers, or COMMAND in their place (on this
node), whose output comes to this terminal. Logs of all roles are in `run_dir/logs`, what goes on is in `run_dir/status.json`. A
role that dies is started again as often as `launch.restarts` says. Ends when the trainers have ended; with the name, the reason
and the last lines of the log of the first role that died otherwise; or with Ctrl-C. Nothing is left running in any case.

SIGUSR1 says that time is running out: the trainers write a checkpoint, and Slurm is asked to start the job again, as it is where a
node was lost. `--join` starts one more extractor for a run that goes on elsewhere, until that is over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from configs.command import PlainError, command
from configs.load import parse
from configs.schema import Config
from slurm import plan
from slurm.follow import OVER, read_status, write_status
from slurm.nodes import NodeError, allocation, lost, requeue
from slurm.processes import Outcome, run_roles, say
from slurm.roles import clear, joining, role_table
from slurm.running import STOP
from store.files import try_lock

JOIN_S = 2.0


@command("launch", status=2)
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="slurm.launch",
        usage="%(prog)s [-h] [--join] CONFIG [key=value ...] [-- COMMAND ...]",
        description="Start and watch all roles of a run, on this machine or over the nodes of a Slurm allocation.",
        epilog="COMMAND takes the place of the trainers, e.g. -- python -m extract.rollout CONFIG --prompts FILE --output FILE",
    )
    parser.add_argument("--join", action="store_true", help="only one more extractor, for a run that goes on elsewhere")
    args, config = parse(parser, argv[:end])
    arguments = [args.config, *args.overrides]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # `run_roles` looks for it
    if args.join:
        return join(config, arguments)
    with contextlib.redirect_stdout(sys.stderr):
        if plan.main(arguments):
            return 2
    with exclusive(config.run_dir) as lock:
        return launch(config, arguments, argv[end + 1 :], lock)


def join(config: Config, arguments: list[str]) -> int:
    """One more extractor until the run is over; anew where the run is started again, since its store is another one then."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    while (state := read_status(config.run_dir)["state"]) not in OVER:
        if state in ("starting", "running"):
            if status := run_roles(joining(config, arguments), config.run_dir / "logs", config.launch).status:
                return status
        else:
            say(f"the run is {state}; waiting for it to start")
            if received := signal.sigtimedwait(STOP, JOIN_S):
                return 128 + received.si_signo
    return 0


def launch(config: Config, arguments: list[str], command: list[str], lock: int) -> int:
    """Run all roles; the exit status. Raises NodeError, StoreError."""
    names = allocation() if config.launch.trainer_nodes else []
    tell = teller(config.run_dir, names)
    clear(config)  # an earlier launch that was killed may have left something
    if not command:
        config.finished.unlink(missing_ok=True)
    try:
        roles = role_table(config, arguments, command, names)
        outcome = run_roles(roles, config.run_dir / "logs", config.launch, inherit=(lock,), tell=tell)
        if outcome.state == "done" and not command and not config.finished.exists():
            outcome = Outcome("failed", 70, f"the trainers ended well, but without {config.finished}", "trainers")
        elif outcome.state == "out_of_time" and config.finished.exists():
            outcome = Outcome("done", 0)
        return _end(outcome, names, tell)
    except NodeError as error:
        tell("failed", reason=str(error))
        raise
    finally:
        clear(config)


def _end(outcome: Outcome, names: list[str], tell: Callable[..., None]) -> int:
    """Say how it ended, and have Slurm start the job again where that is the way on."""
    state, reason = outcome.state, outcome.reason or None
    gone = lost(names) if state in ("failed", "stopped") and names else []
    if gone:
        reason = f"{', '.join(gone)} lost: {reason}"
    if (gone or state == "out_of_time") and names:
        state = "requeued"
    tell(state, reason=reason, role=outcome.role or None, log=outcome.log or None, code=outcome.status)
    if state == "requeued" and outcome.state != "stopped":  # else Slurm knows already
        say(f"{reason or 'a checkpoint is written'}; Slurm is to start this job again")
        requeue()
    return outcome.status


def teller(run_dir: Path, names: list[str]) -> Callable[..., None]:
    """A function that writes `run_dir/status.json`: the state of the run, since when, what failed first and why; the last state of
    the launch before."""
    before = {key: value for key, value in read_status(run_dir).items() if key != "before"}
    job, again = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", 0))
    facts = {"job": job, "restart": again, "nodes": names or [socket.gethostname()], "pid": os.getpid(), "before": before}

    def tell(state: str, **more) -> None:
        record = {"state": state, "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **more, **facts}
        write_status(run_dir, {key: value for key, value in record.items() if value is not None})

    return tell


@contextlib.contextmanager
def exclusive(run_dir: Path) -> Iterator[int]:
    """Hold the run's folder (made if missing) for one launch; gives the lock's file descriptor.

    Roles inherit it, so the folder stays taken while anything of a killed launch is still stopping. Raises PlainError when
    another launch holds it, OSError when it cannot be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / "launch.lock", "a+") as lock:
        if not try_lock(lock):
            lock.seek(0)
            raise PlainError(f"run_dir {run_dir}: in use by {lock.read()}; wait for its end, or give another with run_dir=FOLDER")
        lock.truncate(0)
        lock.write(f"launch {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield lock.fileno()


if __name__ == "__main__":
    sys.exit(main())
