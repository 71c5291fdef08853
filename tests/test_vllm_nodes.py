"""One extractor on two nodes: vLLM with a rank in each of two network namespaces, joined by a bridge."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from test_extractor_conformance import HIDDEN, tokens
from tiny import VLLM, python_environment, write_recipe

from configs.load import load
from extract.hf import HFVerifier
from extract.pool import ExtractionError, Pool
from store.objects import open_store
from store.sample import discard, fetch

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and iproute2"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
]
READY_S = 900
NOTICE_S = 60
# vLLM compiles a helper of its vocabulary's shards even when it is told to run eagerly, which takes minutes on a busy machine.
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture(scope="module")
def hosts():
    """(namespace, address) of two hosts that reach one another and this one."""
    mark, net = f"x{os.getpid()}", f"10.203.{os.getpid() % 250}"
    names = [f"{mark}n{host}" for host in (1, 2)]
    ip("link", "add", mark, "type", "bridge")
    try:
        ip("addr", "add", f"{net}.254/24", "dev", mark)
        ip("link", "set", mark, "up")
        for host, name in enumerate(names, 1):
            ip("netns", "add", name)
            ip("link", "add", f"{mark}v{host}", "type", "veth", "peer", "name", "fabric", "netns", name)
            ip("link", "set", f"{mark}v{host}", "master", mark, "up")
            ip("-n", name, "addr", "add", f"{net}.{host}/24", "dev", "fabric")
            ip("-n", name, "link", "set", "fabric", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [(name, f"{net}.{host}") for host, name in enumerate(names, 1)]
    finally:
        ip("link", "del", mark)
        for name in names:
            ip("netns", "del", name)


@pytest.fixture(scope="module")
def pair(hosts, tiny_verifier, tmp_path_factory):
    """The recipe's configuration and the two processes of a running extractor, the one that serves first."""
    head = hosts[0][1]
    extract = {"host": head, "nodes": 2, "tensor_parallel": 2, "environment": ENVIRONMENT}
    recipe = write_recipe(tmp_path_factory.mktemp("nodes"), tiny_verifier("llama"), {"extract": VLLM | extract})
    config, logs = load(recipe), [recipe.with_name(f"node{rank}.log") for rank in (0, 1)]
    nodes = []
    for rank, (name, _) in enumerate(hosts):
        command = [sys.executable, "-m", "extract.serve", str(recipe), "--node-rank", str(rank), "--master-addr", head]
        with logs[rank].open("wb") as log:
            nodes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *command],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=python_environment(),
                    start_new_session=True,
                )
            )
    try:
        end = time.monotonic() + READY_S
        while not list((config.run_dir / "extractors").glob("*.json")):
            assert time.monotonic() < end and all(node.poll() is None for node in nodes), "\n\n".join(log.read_text() for log in logs)
            time.sleep(0.2)
        yield config, nodes
    finally:
        for node in nodes:
            kill(node)


def kill(node: subprocess.Popen) -> None:
    """A node that loses its power: the process and all that it started."""
    try:
        os.killpg(node.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    node.wait()


def test_both_ranks_publish_their_tokens(pair):
    config, _ = pair
    pool, store = Pool(config), open_store(config.store)
    verifier, contract = HFVerifier(config.verifier.path, "float32", config.draft.taps), pool.contract()
    asked = {f"nodes/0/{index}/0": tokens(length, index) for index, length in enumerate((1, 2, 3, 40, 129, 256, 399))}
    with ThreadPoolExecutor(8) as askers:
        list(askers.map(pool.make, asked, asked.values()))
    for name, token_ids in asked.items():
        states = torch.empty(len(token_ids), 4, HIDDEN)
        manifest = fetch(store, name, contract, token_ids, states)
        half = len(token_ids) // 2
        edges = [(0, half), (half, len(token_ids))] if half else [(0, 1)]
        assert [(piece.start, piece.stop) for piece in manifest.slices] == edges
        wanted = verifier.prefill([token_ids])[0]
        assert float(((states - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) < 1e-5
        discard(store, name)
    assert store.usage().keys == 0
    pool.close()


def test_a_lost_node_is_noticed_by_progress_although_health_answers(pair):
    config, (_, other) = pair
    pool = Pool(config.model_copy(update={"pool": config.pool.model_copy(update={"deadline_s": NOTICE_S})}))
    url = json.loads(next((config.run_dir / "extractors").glob("*.json")).read_text())["url"]
    pool.make("before/0/0/0", tokens(9))
    kill(other)
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    started = time.monotonic()
    with pytest.raises(ExtractionError) as error:
        pool.make("after/0/0/0", tokens(9))
    assert error.value.cause in ("engine", "unreachable", "deadline")
    assert time.monotonic() - started < NOTICE_S + 10
    store = open_store(config.store)
    discard(store, "before/0/0/0")
    discard(store, "after/0/0/0")
    pool.close()
