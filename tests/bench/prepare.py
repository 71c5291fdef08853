"""Data preparation on many rows: speed beside the tokenizer's alone, memory over the run, and the bytes after a kill half way.

`python tests/bench/prepare.py [--rows 200000] [--processes 1] [--verifier DIR]`; without DIR a small tokenizer of the tests is used.
Speeds are per CPU second, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from families import make_verifier  # noqa: E402
from tiny import python_environment, write_recipe  # noqa: E402

from configs.load import load  # noqa: E402
from extract.conversations import read_row  # noqa: E402
from extract.parts import Maker  # noqa: E402
from extract.render import render  # noqa: E402
from extract.rows import Source, chunks  # noqa: E402


def write_rows(path: Path, count: int) -> None:
    """Conversations of one to three questions, answers of 5 to 800 words, most of them short."""
    rng = random.Random(0)
    words = (ROOT / "configs" / "demo_prompts.jsonl").read_text().replace('"', " ").split()

    def text(most: float) -> str:
        size = min(800, int(rng.lognormvariate(most, 1)) + 5)
        begin = rng.randrange(len(words))
        return " ".join((words + words)[begin : begin + size])

    with path.open("w") as sink:
        for number in range(count):
            turns = [(text(2.5), text(3.5)) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
            pairs = [({"role": "user", "content": asked}, {"role": "assistant", "content": told}) for asked, told in turns]
            sink.write(json.dumps({"id": number, "messages": [message for pair in pairs for message in pair]}) + "\n")


def speeds(recipe: str, data: Path, rows: int, scratch: Path) -> tuple[float, float]:
    """Tokens a CPU second of one process's whole work, and of `encode_batch` in one thread on the rendered text alone, in turns."""
    maker, ours, alone, tokens, seen = Maker(load(recipe)), 0.0, 0.0, 0, 0
    for chunk in chunks(Source(str(data))):
        began = time.process_time()
        maker.part(chunk, scratch)
        ours += time.process_time() - began
        texts = [render(maker.tokenizer, read_row(row).messages) for _, row in chunk.parse()]
        began = time.process_time()
        tokens += sum(map(len, maker.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)))
        alone += time.process_time() - began
        if (seen := seen + chunk.size) >= rows:
            break
    return tokens / ours, tokens / alone


def resident(pid: int) -> int:
    """Bytes of a process and its descendants that are theirs alone (shared files are not counted)."""
    try:
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(child) for task in tasks for child in task.read_text().split()]
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        return int(fields["RssAnon"].split()[0]) * 1024 + sum(map(resident, children))
    except (OSError, KeyError):
        return 0


def run(command: list[str]) -> tuple[float, float, list[int]]:
    """CPU seconds, seconds, and resident bytes every half second of a command that must succeed."""
    before, began, memory = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), []
    process = subprocess.Popen(command, env=python_environment())
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            memory.append(resident(process.pid))

    threading.Thread(target=watch, daemon=True).start()
    status = process.wait()
    ended.set()
    if status:
        sys.exit(f"{' '.join(command)} ended with {status}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.monotonic() - began, memory


def kill_half_way(command: list[str], output: Path, parts: int) -> None:
    process = subprocess.Popen(command, env=python_environment())
    while len(list((output / ".parts").glob("*.arrow"))) < parts // 2:
        time.sleep(0.05)
        if process.poll() is not None:
            sys.exit("the run ended before it was killed")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--verifier", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        verifier = args.verifier or Path(make_verifier(work / "verifier", "chatml").path)
        keys = {"data": {"path": str(work / "data"), "length": 4096, "processes": args.processes}, "extract": {"max_model_len": 4097}}
        recipe, data = str(write_recipe(work, verifier, keys)), work / "rows.jsonl"
        write_rows(data, args.rows)
        command = [sys.executable, "-m", "extract.prepare_data", recipe, "--data", str(data), "--output"]
        ours, alone = speeds(recipe, data, min(args.rows, 10_000), work / "part.arrow")
        print(f"tokens a CPU second of a process: {ours:,.0f}, the tokenizer alone {alone:,.0f}: {ours / alone:.2f} of it")
        cpu, seconds, memory = run([*command, str(work / "whole")])
        report = json.loads((work / "whole" / "report.json").read_text())
        print(f"{args.rows:,} rows, {report['tokens']:,} tokens, {report['kept']:,} kept, {seconds:,.0f} s, {cpu:,.0f} CPU s")
        quarters = [max(memory[len(memory) * k // 4 : len(memory) * (k + 1) // 4] or [0]) >> 20 for k in range(4)]
        print(f"resident MiB at most, by quarter of the run: {quarters}")
        kill_half_way([*command, str(work / "killed")], work / "killed", -(-args.rows // 500))
        cpu, *_ = run([*command, str(work / "killed")])
        same = all((work / "killed" / file.name).read_bytes() == file.read_bytes() for file in (work / "whole").glob("*.arrow"))
        print(f"killed half way and run again ({cpu:,.0f} CPU s): data files {'are the same bytes' if same else 'DIFFER'}")
        sys.exit(not same)


if __name__ == "__main__":
    main()
