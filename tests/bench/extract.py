"""vLLM with our connector beside vLLM alone, and states of rollouts made in one pass beside rollout and then prefill.

`python tests/bench/extract.py [--verifier DIR] [--tokens 512] [--turns 8]` (two servers, which take turns: 8 requests at once each).
CPU seconds are of the server's processes: other work on the machine slows the clock, and these hardly.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny import VLLM, python_environment, start_extractor, stop_extractor, write_recipe  # noqa: E402

from extract.engine_vllm import command_line  # noqa: E402
from extract.pool import Pool  # noqa: E402
from store.objects import open_store  # noqa: E402
from store.sample import discard  # noqa: E402

AT_ONCE = 8
ANSWER = 64  # tokens of a rollout
OURS = ("--kv-transfer-config", "--speculative-config", "--middleware")  # and their values: what vLLM alone goes without


@contextlib.contextmanager
def plain_server(config) -> Iterator[tuple[str, int]]:
    """(URL, pid) of vLLM with the same flags, but for the states."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = command_line(config, 0, "127.0.0.1", 0)
    for name in OURS:
        del flags[flags.index(name) : flags.index(name) + 2]
    flags[flags.index("--port") + 1] = str(port)
    code = f"import json, sys; from extract.engine_vllm import serve; serve(json.loads({json.dumps(json.dumps(flags))}))"
    environment = python_environment() | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, "vLLM alone did not come up"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            time.sleep(0.5)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(pid: int) -> float:
    root = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:2]) for process in [root, *root.children(recursive=True)])


def timed(work: Callable[[int], None], pid: int) -> tuple[float, float]:
    """Seconds by the clock, and of the server's processes, for AT_ONCE calls at once."""
    clock, cpu = time.monotonic(), cpu_seconds(pid)
    with ThreadPoolExecutor(AT_ONCE) as askers:
        list(askers.map(work, range(AT_ONCE)))
    return time.monotonic() - clock, cpu_seconds(pid) - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verifier", type=Path, default=ROOT / "verifiers" / "SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt")
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    flags = VLLM["flags"] | {"kv-cache-memory-bytes": 1 << 29}
    extract = {"max_model_len": args.tokens + ANSWER + 1, "batch_tokens": 2048, "batch_size": AT_ONCE, "flags": flags}
    overrides = {
        "extract": VLLM | extract,
        "data": {"length": args.tokens},
        "store": {"bytes": 1 << 30},
        "draft": {"taps": [2, 8, 15, 22, 28]},
        "pool": {"deadline_s": 600},
    }
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        running = start_extractor(write_recipe(Path(scratch), args.verifier, overrides))
        pool, store = Pool(running.config), open_store(running.config.store)

        def prompt(index: int, length: int) -> list[int]:
            return [100 + (7919 * (index + 1) * (position + 1)) % 40000 for position in range(length)]

        def states(index: int, token_ids: list[int] | None = None) -> None:
            pool.make(f"bench/0/{index}/0", token_ids or prompt(index, args.tokens))
            discard(store, f"bench/0/{index}/0")

        def one_pass(index: int) -> None:
            pool.complete(prompt(index, 32), ANSWER, sample=f"bench/0/{index}/0", ignore_eos=True)
            discard(store, f"bench/0/{index}/0")

        def two_passes(index: int) -> None:
            response, _ = pool.complete(prompt(index, 32), ANSWER, ignore_eos=True)
            states(index, [*prompt(index, 32), *response])

        with plain_server(running.config) as (url, plain):

            def alone(index: int) -> None:
                body = {"model": str(args.verifier), "prompt": prompt(index, args.tokens), "max_tokens": 1, "temperature": 0}
                assert httpx.post(f"{url}/v1/completions", json=body, timeout=600, trust_env=False).status_code == 200

            ours = running.process.pid
            rows = {
                "vLLM alone, prefill": (alone, plain, args.tokens),
                "with our connector, states in the store": (states, ours, args.tokens),
                "rollout, states in one pass": (one_pass, ours, ANSWER),
                "rollout, then prefill": (two_passes, ours, ANSWER),
            }
            taken = {name: [] for name in rows}
            for turn in range(args.turns + 1):  # the first one warms up
                order = list(rows.items())
                for name, (work, pid, _) in order if turn % 2 else reversed(order):
                    result = timed(work, pid)
                    taken[name] += [result] if turn else []
        assert stop_extractor(running) == 0
    print(f"{AT_ONCE} requests at once, medians of {args.turns} turns; tokens of a prompt: {args.tokens}, of an answer: {ANSWER}\n")
    print(f"| {'':39} | tok/s | tok / CPU s |\n|{'-' * 41}|{'-' * 7}|{'-' * 13}|")
    for name, (_, _, tokens) in rows.items():
        clock, cpu = (AT_ONCE * tokens / statistics.median(column) for column in zip(*taken[name]))
        print(f"| {name:39} | {clock:5.0f} | {cpu:11.0f} |")


if __name__ == "__main__":
    main()
