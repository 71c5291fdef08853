"""Where a run's Mooncake master is, and what it says over HTTP. Needs nothing of Mooncake's."""

from __future__ import annotations

import json
import time
import urllib.request
from http.client import HTTPException

from configs.schema import Store
from store.objects import Gone

REGISTRATION = "master.json"  # in store.path: {"rpc": "host:port", "http": "http://host:port", "pid": of Mooncake's master}
START_S = 30.0  # the master and its clients may be started together
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def find_master(config: Store) -> tuple[str, str]:
    """Where the master answers: "host:port" for clients, URL of its metrics. It has answered just now. Raises Gone.

    A client that is set up without a master tries for 90 s, so the question comes before.
    """
    path, end = config.path / REGISTRATION, time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > end:
            raise Gone(f"no master has registered in {config.path} (python -m store.master)")
        time.sleep(0.1)
    where = json.loads(path.read_text())
    if (problem := silence(where["http"], config.mooncake.deadline_s)) is not None:
        raise Gone(f"the master of {path} does not answer: {problem}")
    return where["rpc"], where["http"]


def silence(http: str, deadline_s: float) -> str | None:
    """Why the master at this URL is not at work, None where it is."""
    try:
        answer = ask(f"{http}/health", deadline_s)
        return None if json.loads(answer).get("service_ready") else answer
    except (Gone, ValueError) as error:
        return str(error)


def metrics(http: str, deadline_s: float) -> dict[str, float]:
    """The master's metrics without labels. Raises Gone."""
    lines = ask(f"{http}/metrics", deadline_s).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and line[0] != "#" and "{" not in line)
    return {name: float(value) for name, value in pairs}


def ask(url: str, deadline_s: float) -> str:
    """What the master's HTTP server says, asked without the environment's proxies. Raises Gone."""
    try:
        with DIRECT.open(url, timeout=deadline_s) as answer:
            return answer.read().decode()
    except (OSError, HTTPException) as error:
        raise Gone(f"{url}: {getattr(error, 'reason', error)}") from None
