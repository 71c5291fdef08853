"""What a run tells: one JSON line a step, TensorBoard, and a progress line."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from train.step import SUMS


def summarise(counts: Tensor, per_slot: Tensor, objective: float) -> dict:
    """Means of a step from sums over all ranks: counts fp64 [len(SUMS)], per_slot fp64 [2, B] (valid, accepted)."""
    sums = dict(zip(SUMS, counts.tolist(), strict=True))
    slots, blocks = max(1.0, sums["slots"]), max(1.0, sums["blocks"])
    return {
        "loss": objective / sums["normaliser"] if sums["normaliser"] else 0.0,
        "ce": sums["ce"] / slots,
        "tv": sums["tv"] / slots,
        "accuracy": sums["accepted"] / slots,
        "block_length": 1 + sums["accepted_run"] / blocks,  # uniform anchors, bonus included: over-estimates serving
        "confidence_error": sums["confidence_error"] / slots,
        "slots": int(sums["slots"]),
        "tokens": int(sums["tokens"]),
        "samples": int(sums["samples"]),
        "accuracy_by_slot": (per_slot[1] / per_slot[0].clamp_min(1)).tolist(),
    }


class Log:
    """Rank 0's record of a run. Resumed runs append: of two lines of one step the later one holds."""

    def __init__(self, run_dir: Path, total: int, every: int):
        run_dir.mkdir(parents=True, exist_ok=True)
        self.file = (run_dir / "metrics.jsonl").open("a", buffering=1)
        self.validated = run_dir / "validation.jsonl"
        self.board = SummaryWriter(run_dir / "tensorboard")
        self.total, self.every = total, every
        self.window: list[dict] = []
        self.started = time.monotonic()

    def step(self, record: dict) -> None:
        """record: step, `summarise`'s means, lr, checksums of its samples' states, seconds by part, drops and retries by cause, the store's
        traffic."""
        self.file.write(json.dumps(record) + "\n")
        for key, value in record.items():
            if isinstance(value, int | float) and key != "step":
                self.board.add_scalar(key, value, record["step"])
        for group in ("seconds", "drops", "retries", "store"):
            for part, value in record.get(group, {}).items():
                self.board.add_scalar(f"{group}/{part}", value, record["step"])
        self.window.append(record)
        if record["step"] % self.every == 0 or record["step"] == self.total:
            self._progress()

    def _progress(self) -> None:
        window, self.window = self.window, []
        elapsed, self.started = time.monotonic() - self.started, time.monotonic()
        mean = {key: sum(record[key] for record in window) / len(window) for key in ("loss", "block_length", "accuracy")}
        seconds = {part: sum(record["seconds"][part] for record in window) / len(window) for part in window[0]["seconds"]}
        step = window[-1]["step"]
        print(
            f"step {step}/{self.total}  loss {mean['loss']:.4f}  acceptance {mean['accuracy']:.3f} ({mean['block_length']:.2f} a block)  "
            f"{sum(record['tokens'] for record in window) / elapsed:,.0f} tok/s  "
            f"waiting {seconds['fetch'] / max(sum(seconds.values()), 1e-9):.0%}  "
            f"[{'  '.join(f'{part} {value:.2f}s' for part, value in seconds.items())}]  "
            f"lr {window[-1]['lr']:.1e}  eta {timedelta(seconds=int((self.total - step) * elapsed / len(window)))}",
            flush=True,
        )

    def validation(self, record: dict) -> None:
        """record: step, tokens_per_forward and accepted shares by position, on held-out data."""
        with self.validated.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.board.add_scalar("validation/tokens_per_forward", record["tokens_per_forward"], record["step"])
        for position, share in enumerate(record["accepted"], 1):
            self.board.add_scalar(f"validation/accepted_{position}", share, record["step"])
        print(f"step {record['step']}/{self.total}  held out: {record['tokens_per_forward']:.3f} tokens per forward", flush=True)

    def best(self, before: int) -> float:
        """The most tokens per forward of a validation up to step `before`."""
        records = map(json.loads, self.validated.read_text().splitlines() if self.validated.exists() else ())
        return max((record["tokens_per_forward"] for record in records if record["step"] <= before), default=0.0)

    def close(self) -> None:
        self.file.close()
        self.board.close()


class Stopwatch:
    """Seconds of one step by part; on a GPU each mark waits for the device, so parts are not blamed for one another."""

    def __init__(self, device: torch.device):
        self.device, self.seconds, self.last = device, {}, time.monotonic()

    def mark(self, part: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now
