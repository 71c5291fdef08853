"""Rounds: the verifier answers the next prompts and makes their states, gives its devices back, and the draft trains on them.

`python -m slurm.rounds CONFIG [key=value…]`, with `rounds` in CONFIG. Each half of a round is a launch of its own
(`slurm.launch`), so both may use the same machines or devices. States wait in the durable cache between the halves. Started again
after any end, it goes on where it was: rollouts, data preparation, capture and training all do.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from configs.command import command
from configs.load import ConfigError, parse
from configs.schema import Config
from slurm.processes import say
from slurm.role import die_with_parent, shell_status


def run(config: Config, arguments: list[str]) -> int:
    """All rounds that are left; the status of the first launch that fails. `arguments`: CONFIG and overrides, as commands take them.

    Raises ConfigError: no rounds, or no prompts for them.
    """
    if config.rounds is None:
        raise ConfigError("rounds is missing: rounds.batches and rounds.prompts")
    lines = [line for file in config.rounds.prompts for line in _lines(file)]
    batches, steps = config.rounds.batches, config.train.max_steps
    for number in range(-(-steps // batches)):
        if _trained(config.run_dir) >= min(steps, (number + 1) * batches):
            continue
        folder = config.run_dir / "rounds" / f"{number:04d}"
        mine = [*arguments, f"data.path={folder / 'data'}", f"rounds.number={number}"]
        say(f"round {number + 1} of {-(-steps // batches)}")
        status = _answer(config, mine, folder, lines) or _launch([*mine, "launch.extractors=0"])
        if status:
            return status
    return 0


def _answer(config: Config, arguments: list[str], folder: Path, lines: list[str]) -> int:
    """This round's data set and the states of its rows; 0 at once where they are there."""
    done, prompts, rollouts = folder / "captured", folder / "prompts.jsonl", folder / "rollouts.jsonl"
    if done.exists():
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    count = config.rounds.batches * config.train.global_batch
    first = int(folder.name) * count
    prompts.write_text("".join(lines[index % len(lines)] for index in range(first, first + min(count, len(lines)))))
    steps = [
        ["extract.rollout", *arguments, "--prompts", str(prompts), "--output", str(rollouts)],
        ["extract.prepare_data", *arguments, "--data", str(rollouts)],
        ["extract.capture", *arguments],
    ]
    status = _launch([*arguments, "--", "sh", "-c", " && ".join(shlex.join(["python", "-m", *step]) for step in steps)])
    vocabulary = folder.with_name("0000") / "data" / "draft_vocabulary.npy"
    if not status:
        if vocabulary.exists():  # of the first round: it is part of the draft
            (folder / "data" / vocabulary.name).write_bytes(vocabulary.read_bytes())
        done.touch()
    return status


def _launch(arguments: list[str]) -> int:
    """One launch; a signal that ends this process ends it first."""
    child = subprocess.Popen(
        [sys.executable, "-m", "slurm.launch", *arguments],
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
    )
    signal.signal(signal.SIGTERM, lambda signum, frame: child.terminate())
    signal.signal(signal.SIGINT, lambda signum, frame: None)  # a terminal's Ctrl-C reaches the child too
    return shell_status(child.wait())


def _trained(run_dir: Path) -> int:
    """Steps of the latest checkpoint."""
    pointer = run_dir / "checkpoints" / "latest"
    return int(pointer.read_text().removeprefix("step_")) if pointer.exists() else 0


def _lines(file: Path) -> list[str]:
    try:
        with file.open() as text:
            return [f"{line.rstrip()}\n" for line in text if line.strip()]
    except OSError as error:
        raise ConfigError(f"rounds.prompts: {file}: cannot be read ({error.strerror})") from None


@command("slurm.rounds", status=2)
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slurm.rounds", description=__doc__.splitlines()[0])
    args, config = parse(parser, argv)
    return run(config, [args.config, *args.overrides])


if __name__ == "__main__":
    sys.exit(main())
