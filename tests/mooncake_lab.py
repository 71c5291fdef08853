"""A real Mooncake for tests: a master, processes that put, and what is known about each of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import yaml
from processes import Tree, wait_for

from configs.load import load
from configs.schema import Config
from store.contract import StateContract
from store.master_http import REGISTRATION
from store.mooncake import MooncakeStore
from store.objects import Usage

DEADLINE_S, RELEASE_S, ORPHAN_S = 2, 4, 4
SLACK_S = 8.0  # of a busy machine; Mooncake's own patience would be 30 s and more

# Follows commands from stdin, one a line, and answers each with one line: what it returned or raised.
PRODUCER = """
import sys
from configs.load import load
from mooncake_lab import CONTRACT, made
from store.objects import open_store

store = open_store(load(sys.argv[1]).store, float(sys.argv[2]))

def put(name, size, fill):
    store.put(name, memoryview(bytearray([int(fill)]) * int(size)))

def ship(name, tokens, codec):
    from store.sample import publish, put_slice  # with torch, which takes seconds to import

    contract, states = CONTRACT.model_copy(update={"codec": codec}), made(int(tokens))
    cut = max(1, int(tokens) // 3)
    slices = [put_slice(store, name, part, piece, part * cut, codec) for part, piece in enumerate(states.split(cut))]
    publish(store, name, contract, list(range(int(tokens))), slices)

def puts(name, size):
    block, count = memoryview(bytearray(int(size))), 0
    while True:
        store.put(f"{name}/{count}", block)
        print(count, flush=True)
        count += 1

print("ready", flush=True)
for line in sys.stdin:
    command, *arguments = line.split()
    try:
        print(globals()[command](*arguments), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
store.close()
"""


CONTRACT = StateContract(verifier="v", taps=(1, 2, 3), last="pre_norm", dtype="float32", engine={"name": "test"})


def made(tokens: int):
    """The states [tokens, 4, 64] that the producer ships."""
    import torch

    return torch.randn(tokens, 4, 64, generator=torch.Generator().manual_seed(tokens))


class Lab:
    """One master at a time over one folder, producers beside it."""

    def __init__(self, folder: Path, tree: Tree, budget: int = 64 << 20):
        self.folder, self.tree = folder, tree
        recipe = {
            "run_dir": str(folder / "run"),
            "verifier": {"path": "none"},
            "data": {"path": str(folder / "data")},
            "store": {
                "kind": "mooncake",
                "path": str(folder / "store"),
                "bytes": budget,
                "mooncake": {"deadline_s": DEADLINE_S, "release_s": RELEASE_S, "orphan_s": ORPHAN_S},
            },
            "draft": {"taps": [1], "mask_token_id": 0},
        }
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(recipe))
        self.config: Config = load(self.recipe)
        self.master: subprocess.Popen | None = None
        self.log = folder / "master.log"
        tree.env["PYTHONPATH"] = f"{Path(__file__).parents[1]}:{Path(__file__).parent}"

    def start_master(self) -> None:
        registration = self.config.store.path / REGISTRATION
        before = registration.read_text() if registration.exists() else ""
        with self.log.open("ab") as log:  # a pipe that nobody reads would fill and stop it
            self.master = subprocess.Popen(
                [sys.executable, "-m", "store.master", str(self.recipe)], env=self.tree.env, stdout=log, stderr=log
            )
        wait_for(lambda: self.master.poll() is not None or (registration.exists() and registration.read_text() != before), 120)
        assert self.master.poll() is None, self.log.read_text()

    def master_pid(self) -> int:
        """Of Mooncake's own process, beside which ours stands."""
        return json.loads((self.config.store.path / REGISTRATION).read_text())["pid"]

    def producer(self, share: float = 1.0) -> Producer:
        return Producer(self, share)

    def client(self, share: float = 0.0) -> MooncakeStore:
        return MooncakeStore(self.config.store, share)


class Producer:
    """A process with a client of its own."""

    def __init__(self, lab: Lab, share: float):
        command = [sys.executable, "-c", PRODUCER, str(lab.recipe), str(share)]
        self.process = subprocess.Popen(command, env=lab.tree.env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self.process.pid
        assert self.answer() == "ready", lab.log.read_text()

    def send(self, *command: object) -> None:
        self.process.stdin.write(" ".join(map(str, command)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def do(self, *command: object) -> str:
        self.send(*command)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def within(seconds: float, function, *arguments, **keywords):
    """What a call returns or raises, which must come within `seconds` and the machine's slack."""
    began = time.monotonic()
    try:
        return function(*arguments, **keywords)
    except Exception as error:
        return error
    finally:
        took = time.monotonic() - began
        assert took < seconds + SLACK_S, f"{function.__name__} took {took:.1f} s"


def empty(usage: Usage) -> bool:
    return usage.keys == usage.bytes == 0
