"""One extractor: the verifier behind an HTTP server (`extract.protocol`), run by the engine that the recipe names.

`python -m extract.serve CONFIG`; one node of several: `--node-rank R --master-addr A`. It binds a free port, registers in
run_dir/extractors once it can answer, and on SIGTERM finishes what it has taken and exits 0. Of an extractor on several nodes
only the first serves: signal that one, the others end with it.
"""

from __future__ import annotations

import argparse
import sys

from configs.command import command
from configs.load import parse


@command("extract.serve", ValueError)  # what transformers and vLLM raise about a verifier
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="extract.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="of extract.nodes nodes, from 0 (default: %(default)s)")
    parser.add_argument("--master-addr", default="127.0.0.1", metavar="A", help="address of node 0, as the others reach it")
    parser.add_argument("--master-port", type=int, default=29501, metavar="P", help="a free port there (default: %(default)s)")
    args, config = parse(parser, argv)
    if not 0 <= args.node_rank < config.extract.nodes:
        parser.error(f"--node-rank {args.node_rank}: extract.nodes is {config.extract.nodes}")
    # Imported when they run: neither engine needs the other's packages, nor do vLLM's child processes, which import this module again.
    if config.extract.engine == "vllm":
        from extract.engine_vllm import run

        return run(config, args.node_rank, args.master_addr, args.master_port)
    from extract.server import run

    return run(config)


if __name__ == "__main__":
    sys.exit(main())
