"""Run everything that a recipe needs, on this machine: `python -m slurm.launch CONFIG [key=value…] [-- COMMAND…]`.

First the services (the store's master where there is one, the extractor), until each has answered a real request; then the
trainers, or COMMAND in their place, whose output comes to this terminal. Logs of all roles are in `run_dir/logs`. A role that
dies is started again as often as `launch.restarts` says. Ends when the trainers have ended; with the name, the reason and the
last lines of the log of the first role that died otherwise; or with Ctrl-C. Nothing is left running in any case.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx

from configs.schema import Config, config_argument, parse
from slurm.processes import Role, run_roles, say
from store.master_http import REGISTRATION, silence
from store.objects import StoreError, open_store, run_prefix

PROBE_S = 5.0  # an engine that needs longer for one token is not ready yet


class Refused(Exception):
    """The run's folder cannot be had for this launch; the message is one line."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    ours, command = argv[:end], argv[end + 1 :]
    parser = argparse.ArgumentParser(
        prog="slurm.launch",
        usage="%(prog)s [-h] CONFIG [key=value ...] [-- COMMAND ...]",
        description="Start and watch all roles of a run on this machine.",
        epilog="COMMAND takes the place of the trainers, e.g. -- python -m extract.rollout CONFIG --prompts FILE --output FILE",
    )
    config_argument(parser)
    args, config = parse(parser, ours)
    try:
        with exclusive(config.run_dir) as lock:
            _clear(config)  # an earlier launch that was killed may have left something
            roles = role_table(config, [args.config, *args.overrides], command)
            try:
                launch = config.launch
                return run_roles(roles, config.run_dir / "logs", launch.ready_s, launch.grace_s, launch.stuck_s, inherit=(lock,))
            finally:
                _clear(config)
    except Refused as error:
        say(f"run_dir {config.run_dir}: {error}")
        return 2
    except StoreError as error:
        say(f"store.path: {error}")
        return 2


def role_table(config: Config, arguments: list[str], command: list[str]) -> list[Role]:
    """All roles of a run; `arguments` are CONFIG and overrides as every one of our commands takes them."""
    python, restarts, registrations = [sys.executable, "-m"], config.launch.restarts, config.run_dir / "extractors"
    roles = []
    if config.store.kind == "mooncake":
        ready = partial(master_ready, config)
        roles.append(Role("master", [*python, "store.master", *arguments], environment(1), ready, ready, restarts=restarts.master))
    if config.launch.extractors:
        roles.append(
            Role(
                name="extractor-0",
                command=[*python, "extract.serve", *arguments],
                env=environment(config.extract.threads),
                ready=partial(extractor_ready, registrations),
                alive=partial(extractor_alive, registrations),
                forget=partial(forget_dead, registrations),
                restarts=restarts.extractor,
            )
        )
    env = environment(config.train.threads)
    if command:
        return [*roles, Role("command", command, env, echo=True)]
    torchrun = [*python, "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    trainers = [*torchrun, "--nproc-per-node", str(config.launch.trainers), "-m", "train", *arguments]
    return [*roles, Role("trainers", trainers, env, restarts=restarts.trainer, echo=True)]


def environment(threads: int) -> dict[str, str]:
    """What a role's process starts with: ours, its share of the CPU, and no import from the folder it happens to run in."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # `python` is this one
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }


def extractor_ready(registrations: Path) -> str | None:
    """What is missing until an extractor that registers in this folder has answered a real request; None: nothing."""
    registered = next(registrations.glob("*.json"), None)
    if registered is None:
        return "it has not registered yet"
    url = json.loads(registered.read_text())["url"]
    try:
        # Token 0 is in every vocabulary. A proxy from the environment must not come between machines of one run.
        ask = {"prompt": [0], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=ask, timeout=PROBE_S, trust_env=False)
    except httpx.HTTPError as error:
        return f"{url} does not answer ({type(error).__name__})"
    return None if answer.status_code == 200 else f"{url} answers {answer.status_code}: {answer.text[:200]}"


def extractor_alive(registrations: Path) -> str | None:
    """What is wrong with a registered extractor, by its own word; None: nothing. One that is not there yet, or drains, is not asked."""
    for file in registrations.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            url = json.loads(file.read_text())["url"]
            try:
                status = httpx.get(f"{url}/health", timeout=PROBE_S, trust_env=False).status_code
            except httpx.HTTPError as error:
                return f"{url}/health: {type(error).__name__}"
            if status != 200:
                return f"{url}/health: {status}"
    return None


def forget_dead(registrations: Path) -> None:
    """Remove the registrations of this machine's processes that are no more: nobody shall ask them."""
    for file in registrations.glob("*.json"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{json.loads(file.read_text())['pid']}/cmdline").read_bytes():  # of a zombie it is empty
                continue
        file.unlink(missing_ok=True)


def master_ready(config: Config) -> str | None:
    """What is missing until the master has registered and answers; None: nothing."""
    try:
        where = json.loads((config.store.path / REGISTRATION).read_text())
    except FileNotFoundError:
        return "it has not registered yet"
    return silence(where["http"], PROBE_S)


@contextlib.contextmanager
def exclusive(run_dir: Path) -> Iterator[int]:
    """Hold the run's folder (made if missing) for one launch; gives the lock's file descriptor.

    Roles inherit it, so the folder stays taken while anything of a killed launch is still stopping. Raises Refused when
    another launch holds it or it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(run_dir / "launch.lock", "a+"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise Refused(f"in use by {lock.read()}; wait for its end, or give another with run_dir=FOLDER") from None
        except OSError as error:
            raise Refused(f"cannot be used ({error.strerror})") from None
        lock.truncate(0)
        lock.write(f"launch {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield lock.fileno()


def _clear(config: Config) -> None:
    """Remove what processes of this run, none of which lives, have left for others: registrations, states in the store."""
    for file in (config.run_dir / "extractors").glob("*.json"):
        file.unlink(missing_ok=True)
    if config.store.kind == "mooncake":
        (config.store.path / REGISTRATION).unlink(missing_ok=True)  # objects have died with those who held them
    else:
        open_store(config.store).remove_run(run_prefix(config.run_dir))


if __name__ == "__main__":
    sys.exit(main())
