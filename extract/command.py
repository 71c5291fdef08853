"""What the commands of this folder share: a line of progress, and shards."""

from __future__ import annotations

import argparse
import re
import sys
import time


class Progress:
    """One line that is rewritten on a terminal, a line now and then in a log."""

    def __init__(self):
        self.every, self.end = (0.2, "\r") if sys.stderr.isatty() else (10.0, "\n")
        self.started = time.monotonic()
        self.next = self.started + self.every

    def seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    def due(self) -> bool:
        """Whether it is time for the next line."""
        if (now := time.monotonic()) < self.next:
            return False
        self.next = now + self.every
        return True

    def say(self, text: str, end: str = "\n") -> None:
        print(f"{text:<79}", end=end, file=sys.stderr, flush=True)


def shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with i from 0 to n-1, e.g. 0/4")
    return int(match[1]), int(match[2])
