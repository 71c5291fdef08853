"""Follow a run until it is over: `python -m slurm.follow CONFIG [key=value…]`. Exit status 0 where it was done.

Shows each state of `run_dir/status.json`, and the trainers' last line of progress.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

from configs.load import parse
from configs.schema import Config
from slurm.running import last_lines
from store.files import write

OVER = {"done", "failed", "stopped"}
LOOK_S = 1.0


def follow(config: Config, job: str | None = None, once: bool = False) -> str:
    """Print what goes on until the run is over, or Slurm has done with `job`, or (`once`) this launch of it; its last state."""
    terminal, shown, line = sys.stdout.isatty(), None, None
    first = _launch(read_status(config.run_dir))
    while True:
        status = read_status(config.run_dir)
        if once and (status["state"] == "requeued" or _launch(status) != first):
            return status["state"]
        if (key := (status["state"], status.get("since"))) != shown:
            shown = key
            print(("\n" if terminal and line else "") + _headline(status), flush=True)
        over = status["state"] in OVER and job in (None, status.get("job"))
        if over or (job and not subprocess.run(["squeue", "-h", "-j", job], text=True, capture_output=True).stdout.strip()):
            return status["state"]
        if status["state"] == "running" and (now := _progress(config.run_dir / "logs" / "trainers.log")) != line:
            line = now
            print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n", flush=True)
        time.sleep(LOOK_S)


def read_status(run_dir: Path) -> dict:
    """What the launcher last said of a run."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((run_dir / "status.json").read_text())
    return {"state": "waiting", "reason": f"nothing has been launched in {run_dir} yet"}


def write_status(run_dir: Path, status: dict) -> None:
    """Say what goes on. A reader sees the whole file or the one before."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write(run_dir / "status.json", json.dumps(status, indent=1))


def _launch(status: dict) -> tuple:
    """What tells one launch of a run from another."""
    return status.get("job"), status.get("restart"), status.get("pid")


def _headline(status: dict) -> str:
    what = {key: status[key] for key in ("job", "restart", "nodes", "role", "reason", "log") if status.get(key)}
    return f"{status.get('since', '')} {status['state']}  {'  '.join(f'{key} {value}' for key, value in what.items())}".strip()


def _progress(log: Path) -> str | None:
    """The last line that says at which step the trainers are."""
    with contextlib.suppress(FileNotFoundError):
        return next((line for line in reversed(last_lines(log)) if "step " in line), None)
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slurm.follow", description=__doc__.splitlines()[0])
    parser.add_argument("--once", action="store_true", help="until this launch is over, though the run be started again; status 0")
    args, config = parse(parser, argv)
    return 0 if follow(config, once=args.once) == "done" or args.once else 1


if __name__ == "__main__":
    sys.exit(main())
