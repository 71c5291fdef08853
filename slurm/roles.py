"""The table of roles of a run: the command, environment and place of each, and how to see that it is ready and alive."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx

from configs.schema import Config
from slurm.nodes import Node, NodeError, allocation, free_port, step, survey
from slurm.processes import Role
from slurm.role import NODE
from store.master_http import REGISTRATION, silence
from store.objects import open_store, run_prefix

PROBE_S = 5.0  # an engine that needs longer for one token is not ready yet


def role_table(config: Config, arguments: list[str], command: list[str], names: list[str]) -> list[Role]:
    """All roles of a run, over the nodes `names`, or on this machine where there are none. `arguments` are CONFIG and overrides as
    every one of our commands takes them. Raises NodeError."""
    launch, per_extractor = config.launch, config.extract.nodes
    needed = launch.extractors * per_extractor + (0 if command else launch.trainer_nodes)
    if names and (len(names) < needed or (len(names) > needed and not command)):
        raise NodeError(f"the allocation has {len(names)} nodes, launch.extractors, extract.nodes and launch.trainer_nodes take {needed}")
    nodes = survey(names, launch.interface) if names else []
    if nodes:
        arguments = [*arguments, f"store.mooncake.host={nodes[0].address}"]
    roles = [master(config, arguments, nodes[:1])] if config.store.kind == "mooncake" else []
    for number in range(launch.extractors):
        gang = nodes[number * per_extractor : (number + 1) * per_extractor]
        role = extractor(config, arguments, f"extractor-{number}", gang)
        roles.append(role if nodes else replace(role, env=role.env | _devices(config, number * config.extract.tensor_parallel)))
    if command:
        return [*roles, Role("command", command, environment(config.train.threads), echo=True)]
    return [*roles, trainers(config, arguments, nodes[launch.extractors * per_extractor :])]


def master(config: Config, arguments: list[str], nodes: list[Node]) -> Role:
    ready, env = partial(master_ready, config), environment(1, nodes) | {"CUDA_VISIBLE_DEVICES": ""}
    command = [_python(config.python.extract), "-m", "store.master", *arguments]
    return _placed(Role("master", command, env, ready, ready, restarts=config.launch.restarts.master), nodes)


def extractor(config: Config, arguments: list[str], name: str, nodes: list[Node]) -> Role:
    """One extractor, over as many nodes as it spans. Only the first of them serves, and registers under `name`."""
    registration = config.run_dir / "extractors" / f"{name}.json"
    place = [f"extract.host={nodes[0].address}"] if nodes else []
    if len(nodes) > 1:
        place += ["--node-rank", NODE, "--master-addr", nodes[0].address, "--master-port", str(nodes[0].port)]
    role = Role(
        name=name,
        command=[_python(config.python.extract), "-m", "extract.serve", *arguments, *place],
        env=environment(config.extract.threads, nodes) | {"EXTRACTOR": name},
        ready=partial(extractor_ready, registration),
        alive=partial(extractor_alive, registration),
        forget=partial(registration.unlink, missing_ok=True),
        restarts=config.launch.restarts.extractor,
        enough=config.pool.min_extractors,
    )
    return _placed(role, nodes)


def trainers(config: Config, arguments: list[str], nodes: list[Node]) -> Role:
    """All ranks, together one role. They find each other as those of torchrun do, which would import torch once more on each node."""
    launch = config.launch
    address, port = (nodes[0].address, nodes[0].port) if nodes else ("127.0.0.1", free_port("127.0.0.1"))
    env = environment(config.train.threads, nodes)
    env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(launch.trainers * max(1, len(nodes)))}
    if not nodes:
        env |= _devices(config, launch.extractors * config.extract.tensor_parallel)
    command = [_python(config.python.train), "-m", "train", *arguments]
    return _placed(Role("trainers", command, env, restarts=launch.restarts.trainer, ranks=launch.trainers, echo=True), nodes)


def joining(config: Config, arguments: list[str]) -> list[Role]:
    """One more extractor for a run elsewhere, and a job that waits until this launch of that run is over. Raises NodeError."""
    name = f"joined-{os.environ.get('SLURM_JOB_ID') or os.getpid()}"
    nodes = survey(allocation(), config.launch.interface) if config.launch.trainer_nodes else []
    follow = [sys.executable, "-m", "slurm.follow", "--once", *arguments]
    return [extractor(config, arguments, name, nodes), Role(f"{name}-follows", follow, environment(1))]


def environment(threads: int, nodes: list[Node] | tuple[()] = ()) -> dict[str, str]:
    """What a role's process starts with: ours, its share of the CPU, the fabric, and no import from the folder it happens to run in."""
    fabric = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), nodes[0].interface) if nodes else {}
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # `python` is this one
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "SLURM_EXPORT_ENV": "ALL",  # also where the job was submitted without its environment
        **fabric,
    }


def extractor_ready(registration: Path) -> str | None:
    """What is missing until the extractor that registers in this file has answered a real request; None: nothing."""
    ask = {"prompt": [0], "max_tokens": 1, "temperature": 0, "return_token_ids": True}  # token 0 is in every vocabulary
    return _asked(registration, "/v1/completions", ask)


def extractor_alive(registration: Path) -> str | None:
    """What is wrong with a registered extractor, by its own word; None: nothing. One that is not there yet, or drains, is not asked."""
    return _asked(registration, "/health") if registration.exists() else None


def _asked(registration: Path, path: str, body: dict | None = None) -> str | None:
    try:
        url = json.loads(registration.read_text())["url"]
        # A proxy from the environment must not come between machines of one run.
        answer = httpx.request("POST" if body else "GET", url + path, json=body, timeout=PROBE_S, trust_env=False)
    except FileNotFoundError:
        return "it has not registered yet"
    except httpx.HTTPError as error:
        return f"{url} does not answer ({type(error).__name__})"
    return None if answer.status_code == 200 else f"{url} answers {answer.status_code}: {answer.text[:200]}"


def master_ready(config: Config) -> str | None:
    """What is missing until the master has registered and answers; None: nothing."""
    try:
        where = json.loads((config.store.path / REGISTRATION).read_text())
    except FileNotFoundError:
        return "it has not registered yet"
    return silence(where["http"], PROBE_S)


def clear(config: Config) -> None:
    """Remove what roles of this launch, none of which lives, have left for others: registrations, states in the store. Extractors
    that joined the run are others'."""
    for file in (config.run_dir / "extractors").glob("extractor-*.json"):
        file.unlink(missing_ok=True)
    if config.store.kind == "mooncake":
        (config.store.path / REGISTRATION).unlink(missing_ok=True)  # objects have died with those who held them
    else:
        open_store(config.store).remove_run(run_prefix(config.run_dir))


def _placed(role: Role, nodes: list[Node]) -> Role:
    return replace(role, step=step([node.name for node in nodes], role.name)) if nodes else role


def _python(path: Path | None) -> str:
    return str(path or sys.executable)


def _devices(config: Config, first: int) -> dict[str, str]:
    """On one machine: the GPUs from the first-th on are this role's; it takes as many as it has processes."""
    if not config.launch.gpus:
        return {}
    own = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(config.launch.gpus)))).split(",")
    behind = config.launch.extractors * config.extract.tensor_parallel
    count = config.extract.tensor_parallel if first < behind else config.launch.trainers
    return {"CUDA_VISIBLE_DEVICES": ",".join(own[first : first + count])}
