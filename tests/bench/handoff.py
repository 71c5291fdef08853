"""What it costs to hand one sample from a producer process to a consumer process, over TCP on this machine.

`python tests/bench/handoff.py [--repeats N] [--peer DIR]`; DIR: where `pip install --no-deps --target DIR hs-connectors==0.9.0`
has put the peer's package. One run, all ways interleaved, one table: rate (best and median), CPU seconds of both processes, and
how far both grow together from before a way is set up to its peak.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from mooncake_lab import Lab  # noqa: E402
from processes import Tree  # noqa: E402

from configs.load import load  # noqa: E402
from store.contract import StateContract  # noqa: E402
from store.master_http import find_master  # noqa: E402
from store.mooncake import MooncakeStore, connect  # noqa: E402
from store.sample import bytes_of, discard, fetch, put_sample  # noqa: E402

PLANES, WIDTH = 6, 7168  # Kimi-K3's: 86 KB a token
TOKEN = PLANES * WIDTH * 2
SIZES_MB = (1, 16, 64, 256)
BUDGET = 600_000_000  # room for two of the largest
CONTRACT = StateContract(verifier="v", taps=(1, 2, 3, 4, 5), last="pre_norm", dtype="bfloat16", engine={"name": "bench"})


def tokens_of(megabytes: int) -> int:
    return megabytes * 1_000_000 // TOKEN


# Each way has a side in the producer's process, `make`, and one in the consumer's, `take`, which leaves nothing behind.


class Ours:
    """What extractor and trainer do: finiteness and checksums on both sides, a manifest, into the row of a registered batch."""

    def __init__(self, store_config, produces: bool, batch: torch.Tensor):
        self.store = MooncakeStore(store_config, share=1.0 if produces else 0.0)
        if not produces:
            self.store.register(bytes_of(batch))

    def make(self, name: str, states: torch.Tensor) -> None:
        put_sample(self.store, name, CONTRACT, list(range(len(states))), states)

    def take(self, name: str, out: torch.Tensor) -> None:
        discard(self.store, name, fetch(self.store, name, CONTRACT, list(range(len(out))), out))


class Bare:
    """Mooncake's `put_from` and `get_into`, and nothing else."""

    def __init__(self, store_config, produces: bool, batch: torch.Tensor):
        self.client = connect(store_config.mooncake, find_master(store_config)[0], BUDGET if produces else 0)
        self.client.register_buffer(batch.data_ptr(), batch.nbytes)
        from mooncake.store import ReplicateConfig

        self.where = ReplicateConfig()
        self.where.with_hard_pin = True
        self.where.preferred_segment = self.client.get_hostname()

    def make(self, name: str, states: torch.Tensor) -> None:
        assert self.client.put_from(name, states.data_ptr(), states.nbytes, self.where) == 0

    def take(self, name: str, out: torch.Tensor) -> None:
        assert self.client.get_into(name, out.data_ptr(), out.nbytes) == out.nbytes
        self.client.remove(name, True)


class Peer:
    """hs-connectors at its kindest: all memory on the producer's side, no copy into a batch."""

    def __init__(self, store_config, produces: bool, batch: torch.Tensor):
        from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig

        rpc, segment = find_master(store_config)[0], BUDGET if produces else 0
        config = MooncakeStoreConfig("127.0.0.1", master_server_address=rpc, global_segment_size=segment, local_buffer_size=0)
        self.store = MooncakeHiddenStatesStore(config).setup()

    def manifest(self, name: str, count: int) -> dict:
        from hs_connectors.mooncake_store import packed_layout

        tensors, size = packed_layout({"hidden_states": ([count, PLANES, WIDTH], torch.bfloat16), "token_ids": ([count], torch.int64)})
        return {"handle": name, "version": 1, "tensors": tensors, "metadata": {"total_aligned_bytes": size}}

    def make(self, name: str, states: torch.Tensor) -> None:
        from hs_connectors.mooncake_store import assert_finite

        assert_finite("hidden_states", states)
        self.store.put_sample(self.manifest(name, len(states)), {"hidden_states": states, "token_ids": torch.arange(len(states))})

    def take(self, name: str, out: torch.Tensor) -> None:
        self.store.get_sample(self.manifest(name, len(out)))
        self.store.delete_sample(name)


class Tcp:
    """One connection, `sendall` and `recv_into`."""

    def __init__(self, store_config, produces: bool, batch: torch.Tensor):
        path = store_config.path / "bench.sock.port"
        if produces:
            listener = socket.create_server(("127.0.0.1", 0))
            path.write_text(str(listener.getsockname()[1]))
            self.listener, self.socket = listener, None
        else:
            self.socket = socket.create_connection(("127.0.0.1", int(path.read_text())))

    def make(self, name: str, states: torch.Tensor) -> None:
        if self.socket is None:
            self.socket, _ = self.listener.accept()
        print("sending", flush=True)  # the other side must read at the same time
        self.socket.sendall(bytes_of(states))

    def take(self, name: str, out: torch.Tensor) -> None:
        view = bytes_of(out)
        while view:
            view = view[self.socket.recv_into(view) :]


class Memcpy:
    """One copy inside the consumer's process: no handoff at all."""

    def __init__(self, store_config, produces: bool, batch: torch.Tensor):
        self.source = torch.zeros_like(batch) if not produces else None

    def make(self, name: str, states: torch.Tensor) -> None: ...

    def take(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self.source[: len(out)])


WAYS = {"ours, checksums": Ours, "Mooncake bare": Bare, "hs-connectors 0.9.0": Peer, "raw TCP": Tcp, "memcpy": Memcpy}


def produce(recipe: str) -> None:
    """The producer's process: one command a line, "way tokens name"; answers with its CPU seconds and peak memory so far."""
    config, ways = load(recipe).store, {}
    states = torch.randn(tokens_of(max(SIZES_MB)), PLANES, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    print("ready", flush=True)
    for line in sys.stdin:
        command, way, count, name = line.rstrip("\n").split("\t")
        if command == "open":
            forget_peak()
            ways[way] = WAYS[way](config, True, states)
        else:
            ways[way].make(name, states[: int(count)])
        print(time.process_time(), peak_bytes(), flush=True)


class Producer:
    def __init__(self, recipe: Path, environment: dict):
        command = [sys.executable, __file__, "--produce", str(recipe)]
        self.process = subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == "ready\n"

    def send(self, *command) -> None:
        self.process.stdin.write("\t".join(map(str, command)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[float, int]:
        cpu, peak = self.process.stdout.readline().split()
        return float(cpu), int(peak)

    def do(self, *command) -> tuple[float, int]:
        self.send(*command)
        return self.answer()


def hand_over(producer: Producer, way: str, side, out: torch.Tensor, name: str) -> None:
    producer.send("make", way, len(out), name)
    if way == "raw TCP":
        producer.process.stdout.readline()
        side.take(name, out)
        producer.answer()
    else:
        producer.answer()
        side.take(name, out)


def run(repeats: int, ways: list[str], folder: Path) -> str:
    tree, names = Tree(), map("bench/{}".format, itertools.count())
    lab = Lab(folder, tree, BUDGET)
    lab.start_master()
    tree.env["PYTHONPATH"] += os.pathsep + os.pathsep.join(sys.path)
    producer = Producer(lab.recipe, tree.env)
    batch = torch.zeros(tokens_of(max(SIZES_MB)), PLANES, WIDTH, dtype=torch.bfloat16)
    sides, growth, rates, cpu = {}, {}, {}, {}
    for way in ways:
        idle = resident_bytes() + resident_bytes(producer.process.pid)
        forget_peak()
        producer.do("open", way, 0, "")
        sides[way] = WAYS[way](lab.config.store, False, batch)
        for _ in range(2):
            hand_over(producer, way, sides[way], batch, next(names))
        growth[way] = peak_bytes() + peak_bytes(producer.process.pid) - idle
    for repeat, megabytes, way in itertools.product(range(repeats), SIZES_MB, ways):
        out, count = batch[: tokens_of(megabytes)], 8 if megabytes == 1 else 1
        began, used = time.perf_counter(), time.process_time() + cpu_seconds(producer.process.pid)
        for _ in range(count):
            hand_over(producer, way, sides[way], out, next(names))
        gigabytes = count * out.nbytes / 1e9
        rates.setdefault((way, megabytes), []).append(gigabytes / (time.perf_counter() - began))
        cpu.setdefault((way, megabytes), []).append((time.process_time() + cpu_seconds(producer.process.pid) - used) / gigabytes)
        print(f"\r{repeat + 1}/{repeats} {megabytes} MB {way:20}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    producer.process.kill()
    lab.master.terminate()
    lab.master.wait()
    return table(ways, growth, rates, cpu)


def table(ways, growth, rates, cpu) -> str:
    lines = ["| way | " + " | ".join(f"{size} MB" for size in SIZES_MB) + " | grows by |", "|---" * (len(SIZES_MB) + 2) + "|"]
    for way in ways:
        cells = [
            f"{max(rates[way, size]):.2f} ({statistics.median(rates[way, size]):.2f}) GB/s, {statistics.median(cpu[way, size]):.2f} s/GB"
            for size in SIZES_MB
        ]
        lines.append(f"| {way} | " + " | ".join(cells) + f" | {growth[way] / 1e6:.0f} MB |")
    if "Mooncake bare" in ways:
        ratio = [statistics.median(a / b for a, b in zip(rates[ways[0], size], rates["Mooncake bare", size])) for size in SIZES_MB]
        lines.append("| ours over bare, median of pairs | " + " | ".join(f"{value:.2f}" for value in ratio) + " | |")
    return "\n".join(lines)


def resident_bytes(pid: int | str = "self") -> int:
    return _status(pid, "VmRSS")


def peak_bytes(pid: int | str = "self") -> int:
    return _status(pid, "VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(pid: int | str, field: str) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", type=Path, help="folder with hs-connectors 0.9.0")
    parser.add_argument("--produce", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.produce:
        produce(args.produce)
        return
    if args.peer:
        sys.path.append(str(args.peer.resolve()))
    ways = [way for way in WAYS if args.peer or WAYS[way] is not Peer]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        print(run(args.repeats, ways, Path(folder)))


if __name__ == "__main__":
    main()
