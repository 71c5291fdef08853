"""The Mooncake master of a run: `python -m store.master CONFIG`.

Starts Mooncake's own master so that it never evicts, says where in `store.path` once it has answered, and stays beside it:
removes what lost its consumer, logs what the store holds, and ends it when it hangs. Started again after a crash it takes the
same ports, where all clients find it. Ends with the master; on SIGTERM it ends the master and exits 0.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import importlib.util
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from configs.command import PlainError, command
from configs.load import parse
from configs.schema import Config, Mooncake
from store.files import write
from store.master_http import REGISTRATION, ask, metrics, silence
from store.mooncake import connect
from store.objects import Gone

log = logging.getLogger(__name__)

LOOK_S = 1.0
REPORT_S = 30.0
READY_S = 30.0  # Mooncake's master is up within a second
STUCK = 3  # times deadline_s without an answer: it will not come back
PORTS = range(20000, 30000)  # below what Linux gives out by itself, above what Mooncake's clients take
PR_SET_PDEATHSIG = 1
STOP = {signal.SIGTERM, signal.SIGINT}

_libc = ctypes.CDLL(None)  # loaded before any fork


class MasterError(PlainError):
    """The master cannot be started, or has failed; the message is one line."""


@command("store.master")
def main(argv: list[str] | None = None) -> int | None:
    parser = argparse.ArgumentParser(prog="store.master", description=__doc__.splitlines()[0])
    _, config = parse(parser, argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s master: %(message)s", datefmt="%H:%M:%S", force=True)
    if config.store.kind != "mooncake":
        print(f"store.master: store.kind is {config.store.kind}, which needs no master", file=sys.stderr)
        return 2
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # taken by `watch` alone
    run(config)


def run(config: Config) -> None:
    """Start a master, publish it, watch it until a stop signal. Raises MasterError, Gone, OSError."""
    settings, file = config.store.mooncake, config.store.path / REGISTRATION
    config.store.path.mkdir(parents=True, exist_ok=True)
    rpc, http = _ports(settings.host, file)
    master = subprocess.Popen(command(settings, rpc, http), preexec_fn=partial(_die_with, os.getpid()), stdin=subprocess.DEVNULL)
    try:
        where = {"rpc": f"{settings.host}:{rpc}", "http": f"http://{settings.host}:{http}", "pid": master.pid}
        _wait_ready(master, where["http"])
        client = connect(settings, where["rpc"], 0)
        write(file, json.dumps(where))
        log.info("at %s, metrics at %s", where["rpc"], where["http"])
        watch(master, client, where["http"], settings)
        file.unlink(missing_ok=True)
    finally:
        master.kill()
        master.wait()


def command(settings: Mooncake, rpc: int, http: int) -> list[str]:
    """Mooncake's master. Defaults evict acknowledged objects, and starve the reclaim of dead puts: both eviction flags are off."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None:
        raise MasterError("store.kind mooncake needs the package mooncake-transfer-engine")
    flags = {
        "rpc_address": settings.host,
        "rpc_port": rpc,
        "rpc_thread_num": settings.threads,
        "metrics_host": settings.host,
        "metrics_port": http,
        "eviction_high_watermark_ratio": 1.0,
        "eviction_ratio": 0,
        "default_kv_lease_ttl": settings.lease_s * 1000,
        "client_ttl": min(10, settings.release_s),  # without a sign of life, until the memory of a dead process counts no more
        "put_start_discard_timeout_sec": max(1, settings.release_s // 2),  # names are never used again, so nobody waits for this
        "put_start_release_timeout_sec": settings.release_s,
        "enable_metric_reporting": "false",  # `watch` says it in one line
        "minloglevel": 1,
    }
    return [str(Path(spec.submodule_search_locations[0]) / "mooncake_master"), *(f"--{flag}={value}" for flag, value in flags.items())]


def watch(master: subprocess.Popen, client, url: str, settings: Mooncake) -> None:
    """Until a stop signal, remove orphans: objects whose consumer has died, or whose put outlived its asker.

    Raises MasterError where the master ends, or answers nothing for STUCK deadlines.
    """
    since: dict[str, float] = {}  # when each object was seen first, by this process's clock
    swept, answered, reported = 0, time.monotonic(), time.monotonic()
    while signal.sigtimedwait(STOP, LOOK_S) is None:
        if (status := master.poll()) is not None:
            raise MasterError(f"mooncake_master ended with status {status}")
        try:
            keys, now = ask(f"{url}/get_all_keys", settings.deadline_s).split("\n"), time.monotonic()
            since = {key: since.get(key, now) for key in keys if key}
            if orphans := [key for key, seen in since.items() if now - seen > settings.orphan_s]:
                # Where the consumer was only slow its read fails, or its checksum does, and it asks again.
                swept += client.batch_remove(orphans, True).count(0)
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                report(metrics(url, settings.deadline_s), swept)
        except Gone as error:
            if (silent := time.monotonic() - answered) > STUCK * settings.deadline_s:
                raise MasterError(f"mooncake_master has not answered for {silent:.0f} s ({error})") from None
        else:
            answered = time.monotonic()


def report(values: dict[str, float], swept: int) -> None:
    """One line of what the store holds. Raises MasterError where it has lost something."""
    log.info(
        "%d objects, %.1f of %.1f MB, %d clients, %d puts without room, %d puts that never ended, %d orphans removed",
        values["master_key_count"],
        values["master_allocated_bytes"] / 1e6,
        values["master_total_capacity_bytes"] / 1e6,
        values["master_active_clients"],
        values["master_put_start_alloc_failures_total"],
        values["master_put_start_discard_cnt"],
        swept,
    )
    if evicted := values["master_evicted_key_count"]:
        raise MasterError(f"{evicted:.0f} objects were evicted, which must never happen: states are being lost")


def _ports(host: str, file: Path) -> list[int]:
    """Ports for clients and for metrics: those of the master that was here before, else two free ones.

    Clients keep to the address that they were set up with, and mount their memory again when a master answers there.
    """
    if file.exists():
        before = json.loads(file.read_text())
        if silence(before["http"], 1.0) is None:
            raise MasterError(f"the master that {file} names is still running")
        return [int(before[key].rpartition(":")[2]) for key in ("rpc", "http")]
    free = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise MasterError(f"store.mooncake.host = {host!r}: no port can be had there ({error.strerror})") from None
                continue
        free.append(port)
        if len(free) == 2:
            return free
    raise MasterError(f"store.mooncake.host = {host!r}: no free port in {PORTS}")


def _wait_ready(master: subprocess.Popen, url: str) -> None:
    end = time.monotonic() + READY_S
    while (problem := silence(url, 1.0)) is not None:
        if (status := master.poll()) is not None:
            raise MasterError(f"mooncake_master ended with status {status} before it answered")
        if time.monotonic() > end:
            raise MasterError(f"mooncake_master did not answer within {READY_S:.0f} s: {problem}")
        time.sleep(0.05)


def _die_with(parent: int) -> None:
    """Between fork and exec: the kernel kills this process when `parent` dies."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
