"""The nodes of a Slurm allocation: which there are, where each answers, how to start something on them, whether they still live.

`python -m slurm.nodes PEER…` says of the node that it runs on, as one line of JSON, what `survey` asks all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from configs.command import PlainError, command

PORTS = range(20000, 32768)  # below what Linux gives out by itself
SURVEY_S = 120.0
ALIVE_S = 5.0


class NodeError(PlainError):
    """Something is wrong with the allocation; the message is one line."""


@dataclass(frozen=True)
class Node:
    name: str
    address: str  # on the fabric
    interface: str
    port: int  # that was free a moment ago


def allocation() -> list[str]:
    """Names of the nodes of this job, the first being the one that runs the batch script. Raises NodeError outside a job."""
    if "SLURM_JOB_NODELIST" not in os.environ:
        raise NodeError("launch.trainer_nodes: more than one machine takes a Slurm allocation (sbatch slurm/run.sbatch CONFIG)")
    return ask_slurm("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()


def step(names: Sequence[str], title: str) -> list[str]:
    """srun that runs a command once on each of these nodes, with all that the job has there, beside other steps.

    What a step does not say it takes from the job's own options, which are about other numbers of nodes and tasks.
    """
    count = str(len(names))
    shape = ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--nodelist", ",".join(names), "--overlap", "--mem", "0"]
    cpus = os.environ.get("SLURM_CPUS_ON_NODE", "1")
    label = ["--label"] if len(names) > 1 else []
    return ["srun", *shape, "--cpus-per-task", cpus, "--kill-on-bad-exit=1", "--input", "none", "--job-name", title, *label]


def survey(names: Sequence[str], interface: str | None) -> list[Node]:
    """What each node says of itself. Raises NodeError: one does not answer, or has no such interface."""
    choice = ["--interface", interface] if interface else []
    command = [part for part in step(names, "survey") if part != "--label"]
    command += [sys.executable, "-m", "slurm.nodes", *choice, *names]
    try:
        lines = ask_slurm(*command, timeout_s=SURVEY_S).splitlines()
    except subprocess.TimeoutExpired:
        raise NodeError(f"nodes {', '.join(names)} did not answer within {SURVEY_S:.0f} s") from None
    found = {node.name: node for node in (Node(**json.loads(line)) for line in lines)}
    if len({node.interface for node in found.values()}) > 1:
        facts = ", ".join(f"{node.name} {node.interface}" for node in found.values())
        raise NodeError(f"launch.interface: name one that all nodes have; by themselves they would choose {facts}")
    return [found[name] for name in names]


def lost(names: Sequence[str]) -> list[str]:
    """Those of the nodes whose slurmd cannot be reached. Slurm itself may take minutes to notice."""
    port = int(re.search(r"SlurmdPort\s*=\s*(\d+)", ask_slurm("scontrol", "show", "config"))[1])
    gone = []
    for line in ask_slurm("scontrol", "--oneliner", "show", "node", ",".join(names)).splitlines():
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        try:
            socket.create_connection((fields["NodeAddr"], port), ALIVE_S).close()
        except OSError:
            gone.append(fields["NodeName"])
    return gone


def requeue() -> None:
    """Have Slurm end this job and start it again. Raises NodeError where it does not do that."""
    ask_slurm("scontrol", "requeue", os.environ["SLURM_JOB_ID"])


def ask_slurm(*command: str, timeout_s: float | None = None) -> str:
    """What a command of Slurm prints. Raises NodeError with what it says where it fails, TimeoutExpired."""
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=timeout_s)
    except OSError as error:
        raise NodeError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise NodeError(" ".join(done.stderr.split()) or f"{command[0]} ended with status {done.returncode}")
    return done.stdout


def describe(interface: str | None, peers: Sequence[str]) -> Node:
    """This node. Without `interface` its address is the one from which it reaches another of `peers`. Raises NodeError."""
    name, interfaces = os.environ.get("SLURMD_NODENAME", socket.gethostname()), psutil.net_if_addrs().items()
    known = {key: entry.address for key, found in interfaces for entry in reversed(found) if entry.family == socket.AF_INET}
    if interface is None:
        peer = next((peer for peer in peers if peer != name), "127.0.0.1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # sends nothing, but picks a route
            address = probe.getsockname()[0]
        interface = next(key for key, value in known.items() if value == address)
    elif interface not in known:
        raise NodeError(f"launch.interface: {interface} has no address on {name}, which has {', '.join(map('='.join, known.items()))}")
    return Node(name, known[interface], interface, free_port(known[interface]))


def free_port(address: str) -> int:
    """A port that nothing uses now. At random, so that two jobs that look at once do not find the same."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise NodeError(f"no free port in {PORTS.start}..{PORTS.stop - 1}")


@command("slurm.nodes")
def main() -> None:
    parser = argparse.ArgumentParser(prog="slurm.nodes", description="Where this node answers, as JSON.")
    parser.add_argument("--interface", metavar="NAME", help="of the fabric (default: by which it reaches a peer)")
    parser.add_argument("peers", nargs="*", metavar="PEER")
    args = parser.parse_args()
    print(json.dumps(vars(describe(args.interface, args.peers))))


if __name__ == "__main__":
    sys.exit(main())
