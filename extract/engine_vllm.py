"""vLLM as the extractor's engine: its own command line and server, run in this process, with the settings that states need.

vLLM is asked for one thing that it knows (`extract_hidden_states`) and given two classes that it loads by name:
`extract.connector.StateConnector` in the engine and its ranks, `extract.middleware.Gate` around the HTTP server.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from typing import Any

from configs.load import ConfigError
from configs.schema import Config
from extract import k3_capture
from extract.sockets import socket_folder
from store.contract import StateContract
from store.verifier import fingerprint, text_config

SUPPORTED = "0.32."  # the connector's interface calls itself experimental: another release has to be tried first
SHUTDOWN_S = 30  # the middleware has drained by then; this is for the engine's own tidying, which takes seconds
KEEPALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 5,  # seconds
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
}

# Flags of vLLM that a recipe cannot pass, and what sets them instead.
OURS = {
    "model": "verifier.path",
    "dtype": "verifier.dtype",
    "trust-remote-code": "verifier.trust_remote_code",
    "host": "extract.host",
    "port": "free, and registered in run_dir/extractors",
    "max-model-len": "extract.max_model_len",
    "max-num-seqs": "extract.batch_size",
    "max-num-batched-tokens": "extract.batch_tokens",
    "tensor-parallel-size": "extract.tensor_parallel",
    "nnodes": "extract.nodes",
    "node-rank": "the command line of extract.serve",
    "master-addr": "the command line of extract.serve",
    "master-port": "the command line of extract.serve",
    "headless": "the command line of extract.serve",
    "shutdown-timeout": "extract.drain_s",
    "speculative-config": "draft.taps",
    "generation-config": "the request's sampling keys, and nothing else",
    "kv-transfer-config": "the connector is ours",
    "middleware": "the middleware is ours",
    "enable-prefix-caching": "always off: a cached prefix has no states",
    "enable-chunked-prefill": "always off: it changes states",
    "pipeline-parallel-size": "always 1: taps would be on several ranks",
    "data-parallel-size": "always 1: start more extractors instead",
    "decode-context-parallel-size": "always 1: each rank must hold all states",
    "api-server-count": "always 1: verdicts go to one",
}


def run(config: Config, node_rank: int = 0, master_addr: str = "127.0.0.1", master_port: int = 29501) -> int:
    """Serve until SIGTERM (after draining) or the engine's death; returns the exit status.

    Raises ConfigError: settings that cannot work, or no vLLM of the supported version.
    """
    flags = command_line(config, node_rank, master_addr, master_port)
    _require_vllm()
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # not to cores: servers of one machine would all choose the same
        "OMP_NUM_THREADS": str(config.extract.threads),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",  # seconds; longer than clients keep a connection, so that no ask meets a closing one
        "VLLM_NO_USAGE_STATS": "1",
    }
    if config.extract.nodes > 1:
        defaults |= _interface(master_addr, master_port)
    if config.extract.flags.get("enforce-eager"):
        defaults["TORCHDYNAMO_DISABLE"] = "1"  # vLLM compiles a helper of its vocabulary's shards all the same, for minutes on a CPU
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ |= config.extract.environment
    if text_config(config.verifier.path).get("attn_res_block_size"):
        _use_plugin()
    if node_rank:
        threading.Thread(target=_end_with, args=(master_addr, master_port), daemon=True).start()
    with socket_folder() as folder:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))
        serve(flags)
    return 0


def serve(flags: list[str]) -> None:
    """`vllm serve` with these arguments, in this process, until its end."""
    # The command itself cannot be called: it asks for the distribution `vllm`, whose CPU build is called vllm-cpu.
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    print("vllm serve", *flags, file=sys.stderr, flush=True)
    args = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(flags)
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    if args.headless:
        from vllm.entrypoints.cli.serve import run_headless

        args.api_server_count = 0
        run_headless(args)
    else:
        import uvloop
        from vllm.entrypoints.launchers.api_server.entry import run_server

        with contextlib.suppress(KeyboardInterrupt):  # how vLLM takes a SIGTERM while it loads
            uvloop.run(run_server(args))


def command_line(config: Config, node_rank: int, master_addr: str, master_port: int) -> list[str]:
    """The arguments of `vllm serve`. Raises ConfigError naming the key that is in the way."""
    extract, verifier = config.extract, config.verifier
    if extract.batch_tokens < extract.max_model_len:
        raise ConfigError(
            f"extract.batch_tokens: {extract.batch_tokens} must be at least extract.max_model_len ({extract.max_model_len}): "
            "a prompt is prefilled whole"
        )
    layers = text_config(verifier.path)["num_hidden_layers"]
    if wrong := [tap for tap in config.draft.taps if tap >= layers]:
        raise ConfigError(f"draft.taps: {wrong}: {verifier.path} has {layers} layers, so a tap is one of 0..{layers - 1}")
    ours: dict[str, Any] = {
        "model": verifier.path,
        "dtype": verifier.dtype,
        "trust-remote-code": verifier.trust_remote_code,
        "host": extract.host,
        "port": 0,
        "max-model-len": extract.max_model_len,
        "max-num-seqs": extract.batch_size,
        "max-num-batched-tokens": extract.batch_tokens,
        "enable-prefix-caching": False,
        "enable-chunked-prefill": False,
        "tensor-parallel-size": extract.tensor_parallel,
        "shutdown-timeout": SHUTDOWN_S,
        "generation-config": "vllm",  # what a request does not say is neutral, and not the verifier's own taste
        "disable-uvicorn-access-log": True,
        "speculative-config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*config.draft.taps, layers]}},
        },
        "kv-transfer-config": {
            "kv_connector": "StateConnector",
            "kv_connector_module_path": "extract.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "config": config.model_dump(mode="json"),
                "fingerprint": fingerprint(verifier.path),
                "verdicts": f"verdicts-{uuid.uuid4().hex}",
            },
        },
        "middleware": "extract.middleware.Gate",
    }
    if extract.nodes > 1:
        ours |= {"nnodes": extract.nodes, "node-rank": node_rank, "master-addr": master_addr, "master-port": master_port}
        ours |= {"headless": True} if node_rank else {}
    flags = {name.replace("_", "-"): value for name, value in extract.flags.items()}
    for name in flags:
        if reason := OURS.get(name.removeprefix("no-")):
            raise ConfigError(f"extract.flags.{name}: not a flag for a recipe ({reason})")
    return [text for name, value in (flags | ours).items() for text in _flag(name, value)]


def state_contract(vllm_config) -> StateContract:
    """What the states of a running engine are, by the engine's own configuration. Raises ValueError where they are unusable."""
    _refuse(vllm_config)
    model, cache, extra = vllm_config.model_config, vllm_config.cache_config, vllm_config.kv_transfer_config.kv_connector_extra_config
    return StateContract(
        verifier=extra["fingerprint"],
        taps=tuple(_layer_ids(vllm_config)[:-1]),
        last="pre_norm",
        residual="prefix/stream" if getattr(model.hf_text_config, "attn_res_block_size", None) else "stream",
        dtype=str(model.dtype).removeprefix("torch."),
        codec=extra["config"]["store"]["codec"],
        engine={
            "name": "vllm",
            "version": _version(),
            "kv_dtype": cache.cache_dtype,
            "quantization": model.quantization or "none",
            "prefix_caching": cache.enable_prefix_caching,
            "chunked_prefill": vllm_config.scheduler_config.enable_chunked_prefill,
        },
    )


def _refuse(vllm_config) -> None:
    """Flags are refused by name; this is about what the engine made of them and of its own defaults."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    wrong = {
        "prefix caching is on": vllm_config.cache_config.enable_prefix_caching,
        "chunked prefill is on": scheduler.enable_chunked_prefill,
        "a prompt does not fit in one step": scheduler.max_num_batched_tokens < vllm_config.model_config.max_model_len - 1,
        "ranks do not all hold all tokens": parallel.world_size != parallel.tensor_parallel_size * parallel.data_parallel_size
        or parallel.data_parallel_size != 1
        or parallel.decode_context_parallel_size != 1,
        f"the last state is not that of layer {layers}": _layer_ids(vllm_config)[-1] != layers,
    }
    if found := [problem for problem, holds in wrong.items() if holds]:
        raise ValueError(f"this vLLM cannot extract states: {', '.join(found)}")


def _layer_ids(vllm_config) -> list[int]:
    """Aux ids as the engine's own configuration has them: the taps and the last layer."""
    return list(vllm_config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)


def _interface(master_addr: str, master_port: int) -> dict[str, str]:
    """This node's address and interface towards the head: ranks that choose by themselves may choose networks that do not meet."""
    import psutil

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master_addr, master_port))  # sends nothing, but picks a route
            address = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"--master-addr {master_addr}: no route to it ({error.strerror or error})") from None
    names = [name for name, known in psutil.net_if_addrs().items() if address in (item.address for item in known)]
    return {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": names[0]}


def _end_with(master_addr: str, master_port: int) -> None:
    """End this node when node 0 ends: its rank would wait for the next step for ever.

    A silent connection to the port where node 0's rank gathers the others lasts as long as that rank does.
    """
    while True:
        try:
            head = socket.create_connection((master_addr, master_port), timeout=5)
            break
        except OSError:  # it is still loading
            time.sleep(1)
    head.settimeout(None)
    for option, value in KEEPALIVE.items():  # a node that lost its power closes nothing
        head.setsockopt(*option, value)
    with contextlib.suppress(OSError):
        head.recv(1)
    print(f"extract.serve: node 0 ({master_addr}) has ended", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _require_vllm() -> None:
    if not (version := _version()).startswith(SUPPORTED):
        raise ConfigError(
            f"extract.engine: vllm needs vllm {SUPPORTED}* (or vllm-cpu on a machine without a GPU), found {version or 'none'}"
        )


def _use_plugin() -> None:
    """Switch on `extract.k3_capture` in every process of the engine, once it is sure that they will find it."""
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name=k3_capture.PLUGIN)
    allowed = os.environ.get("VLLM_PLUGINS")
    if not found or (allowed is not None and k3_capture.PLUGIN not in allowed.split(",")):
        raise ConfigError(
            f"verifier.path: its residual stream is in blocks, which needs vLLM's plugin {k3_capture.PLUGIN}: "
            "install this package in the extractor's environment, and name the plugin in VLLM_PLUGINS if that is set"
        )
    os.environ[k3_capture.SWITCH] = "1"


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _flag(name: str, value: Any) -> list[str]:
    """A flag as argparse wants it: true and false as --name and --no-name, mappings and lists as JSON."""
    if isinstance(value, bool):
        return [f"--{name}"] if value else [f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
