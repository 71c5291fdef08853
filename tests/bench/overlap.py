"""Whether extractor and trainer keep each other waiting: `python tests/bench/overlap.py [--steps N]`.

A launch of real processes over Mooncake, with a tiny verifier and one rank. The extractor runs at its own speed first, which is
faster than the trainer's, then is slowed down to twice the trainer's time for a sample. The first fifth of a run is warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

BATCH = 4


def serve(recipe: str, pace_s: str, record: str) -> int:
    """`extract.serve`, but a sample takes `pace_s` at least; writes when each was done, and how long there was nothing to do by then."""
    from extract import engine_transformers
    from extract.engine_transformers import TransformersEngine
    from extract.serve import main

    receive, put_sample, idle, last = TransformersEngine._receive, engine_transformers.put_sample, 0.0, time.monotonic()

    def timed(engine):
        nonlocal idle, last
        began = time.monotonic()
        try:
            return receive(engine)
        finally:
            last = time.monotonic()
            idle += last - began

    def paced(*arguments):
        put_sample(*arguments)
        time.sleep(max(0.0, last + float(pace_s) - time.monotonic()))
        with open(record, "a") as file:
            print(time.monotonic(), idle, file=file)

    TransformersEngine._receive, engine_transformers.put_sample = timed, paced
    return main([recipe])


def launch(recipe: str, pace_s: str, record: str) -> int:
    from slurm import launch as launcher

    table = launcher.role_table

    def role_table(*arguments):
        ours = [sys.executable, __file__, "--serve", recipe, pace_s, record]
        return [replace(role, command=ours) if role.name.startswith("extractor") else role for role in table(*arguments)]

    launcher.role_table = role_table
    return launcher.main([recipe])


def measure(folder: Path, verifier: Path, data: Path, steps: int, pace_s: float) -> tuple[float, float, float, float]:
    """Seconds of a sample in the extractor and in the rank, share of its time that the rank waits and that the extractor idles."""
    from tiny import write_recipe

    overrides = {
        "data": {"path": str(data)},
        "extract": {"batch_size": 1},
        "store": {"kind": "mooncake", "bytes": 32_000_000},
        "train": {"epochs": steps, "max_steps": steps, "global_batch": BATCH, "num_anchors": 48, "log_every": 10},
    }
    recipe, record = write_recipe(folder, verifier, overrides), folder / "samples"
    command = [sys.executable, __file__, "--launch", recipe, str(pace_s), record]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}, stdout=subprocess.DEVNULL)
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][steps // 5 :]
    waited = sum(record["seconds"]["fetch"] for record in metrics)
    worked = sum(sum(record["seconds"].values()) for record in metrics) - waited
    made = [tuple(map(float, line.split())) for line in record.read_text().splitlines()]
    made = made[-steps * BATCH :][steps * BATCH // 5 :]
    wall, idle = (last - first for first, last in zip(made[0], made[-1], strict=True))
    return (wall - idle) / (len(made) - 1), worked / (len(metrics) * BATCH), waited / (waited + worked), idle / wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--launch", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve or args.launch:
        sys.exit(serve(*args.serve) if args.serve else launch(*args.launch))
    import numpy as np
    from datasets import Dataset
    from tiny import MASK, save_tiny_verifier

    from store.contract import DataContract

    with tempfile.TemporaryDirectory() as name:
        folder, chance = Path(name), np.random.default_rng(0)
        verifier, data = save_tiny_verifier(folder / "verifier", "llama"), folder / "data"
        mask = np.array([0] * 6 + [1] * 390, np.uint8)
        rows = [{"input_ids": chance.integers(4, MASK, 396).astype(np.int32), "loss_mask": mask, "id": str(row)} for row in range(64)]
        Dataset.from_list(rows).save_to_disk(data)
        contract = DataContract(tokenizer="t", template="t", length=400, seed=0, filters={})
        (data / "data_contract.json").write_text(contract.model_dump_json())
        faster = measure(folder / "faster", verifier, data, args.steps, 0.0)
        slower = measure(folder / "slower", verifier, data, args.steps, 2 * faster[1])
    print("| extractor | its ms a sample | the rank's | rank waits | extractor idles |\n|---|---|---|---|---|")
    for what, (makes, uses, waits, idles) in (("faster", faster), ("slower", slower)):
        print(f"| {what} | {1e3 * makes:.1f} | {1e3 * uses:.1f} | {waits:.1%} | {idles:.1%} |")


if __name__ == "__main__":
    main()
