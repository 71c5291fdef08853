"""Run one role so that nothing outlives it: `python -m slurm.role [--grace SECONDS] [--ranks N] -- COMMAND…`.

The wrapper passes SIGTERM and SIGINT on to the command and gives it `--grace` seconds then, kills every descendant when the
command has ended (also those that were forked twice or made a session of their own), and exits with the command's status,
128 + N where signal N ended it. SIGUSR2 is a SIGTERM that srun passes on; SIGUSR1 goes to those below that have a handler for it
(not to a shell around them). It stops by itself when its own parent dies, and the command dies with the wrapper. In COMMAND,
`{node}` is the number of this node in its step. With `--ranks` there are N of the command, the ranks of this node in a world of
WORLD_SIZE, told who they are as torchrun would; the first that fails is the end of all. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SWEEP_S = 10.0  # a process in uninterruptible sleep cannot be killed, and must not hold up everything else

NODE = "{node}"

STOP = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGUSR2: signal.SIGTERM}
AWAITED = STOP.keys() | {signal.SIGUSR1, signal.SIGCHLD}

_libc = ctypes.CDLL(None, use_errno=True)  # loaded once: `die_with_parent` runs between fork and exec


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slurm.role", description="Run one role; nothing outlives it.")
    parser.add_argument("--grace", type=float, default=10.0, metavar="SECONDS", help="between a stop signal and SIGKILL (default 10)")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="how many of COMMAND, each told its RANK and LOCAL_RANK")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    args = parser.parse_args(argv)
    die_with_parent(os.getppid(), signal.SIGTERM)
    node = os.environ.get("SLURM_NODEID", "0")
    first = int(node) * args.ranks if args.ranks < int(os.environ.get("WORLD_SIZE", "1")) else 0
    ranks = [{"RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(args.ranks)]
    return run([node if part == NODE else part for part in args.command], args.grace, ranks or [{}])


def run(command: list[str], grace_s: float, ranks: list[dict[str, str]]) -> int:
    """Run `command`, as often as there are `ranks` and with their environments, until all or one that fails has ended; kill what
    is left. Returns its exit status (128 + N for signal N, 127 if it cannot start)."""
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)  # taken one at a time below: no handler can interrupt the bookkeeping
    children = {_start(command, rank): rank.get("RANK") for rank in ranks}
    deadline = None
    try:
        while (status := _reap(children)) is None:
            left = max(deadline - time.monotonic(), 0) if deadline else 3600
            received = signal.sigtimedwait(AWAITED, left)
            if received is None and deadline:
                print(f"slurm.role: still running {grace_s:g} s after it was told to stop, killed: {' '.join(command)}", file=sys.stderr)
                return 128 + signal.SIGKILL
            if received and received.si_signo in STOP:
                for child in children:
                    os.kill(child, STOP[received.si_signo])  # not reaped yet, so the pid is still the child's
                deadline = deadline or time.monotonic() + grace_s
            elif received and received.si_signo == signal.SIGUSR1:
                for pid in descendants(os.getpid()):
                    if _handles(pid, signal.SIGUSR1):
                        _kill(pid, signal.SIGUSR1)
        return status
    finally:
        if left := sweep():
            print(f"slurm.role: cannot be killed (uninterruptible sleep?): processes {left}", file=sys.stderr)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies, so that `sweep` finds it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: int) -> None:
    """Have the kernel send `signum` to this process when `parent` dies, or send it now if that has happened already."""
    _prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def sweep(keep: Collection[int] = ()) -> list[int]:
    """SIGKILL all descendants of this process, but for the trees below its children `keep`, and reap them if there are no such.

    Returns the pids that were still alive after SWEEP_S seconds.
    """
    end = time.monotonic() + SWEEP_S
    while True:
        alive = descendants(os.getpid(), keep)
        for pid in alive:
            _kill(pid)
        while not keep and _wait_any():
            pass
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.01)


def descendants(root: int, without: Collection[int] = ()) -> list[int]:
    """Pids of all living (not zombie) processes below `root`, and not in the trees of `without`, from one walk over /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since the listing
        state, parent = stat.rpartition(")")[2].split()[:2]  # the name before may hold blanks and brackets
        if state not in "ZX" and int(folder.name) not in without:
            children.setdefault(int(parent), []).append(int(folder.name))
    found = list(children.get(root, ()))
    for pid in found:  # grows while it is walked
        found += children.get(pid, ())
    return found


def shell_status(code: int) -> int:
    """What Python calls exit code -N, the end by signal N, is 128 + N to a shell."""
    return code if code >= 0 else 128 - code


def _start(command: list[str], env: dict[str, str]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(parent, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for signum in (signal.SIGUSR1, signal.SIGUSR2):  # srun sends them to every process of a step, and most would die of it
            signal.signal(signum, signal.SIG_IGN)
        os.execvpe(command[0], command, os.environ | env)
    except OSError as error:
        print(f"slurm.role: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _reap(children: dict[int, str | None]) -> int | None:
    """Reap all that has ended (orphans too); the exit status of one of `children` that has failed, 0 once all have ended well."""
    while ended := _wait_any():
        if ended[0] in children:
            rank, status = children.pop(ended[0]), shell_status(os.waitstatus_to_exitcode(ended[1]))
            if status and rank:
                print(f"slurm.role: rank {rank} ended with status {status}", file=sys.stderr, flush=True)
            if status or not children:
                return status
    return None


def _wait_any() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _kill(pid: int, signum: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # ended since it was seen, or not ours to kill: `sweep` reports it
        os.kill(pid, signum)


def _handles(pid: int, signum: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        caught = (Path("/proc") / str(pid) / "status").read_text().partition("SigCgt:")[2].split(None, 1)[0]
        return bool(int(caught, 16) >> (signum - 1) & 1)
    return False


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main())
