"""What the commands of this folder share: a line of progress, work in threads, and shards."""

from __future__ import annotations

import argparse
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T, R = TypeVar("T"), TypeVar("R")


class Progress:
    """One line that is rewritten on a terminal, a line now and then in a log."""

    def __init__(self):
        self.every, self.end = (0.2, "\r") if sys.stderr.isatty() else (10.0, "\n")
        self.started = time.monotonic()
        self.next = self.started + self.every

    def seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    def tell(self, text: str, share: float) -> None:
        """Say `text` if it is time for the next line, and how long the rest takes where a share of the work is known to be done."""
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + self.every
            self.say(text + (f", {self.seconds() * (1 / share - 1):,.0f} s left" if share else ""), self.end)

    def say(self, text: str, end: str = "\n") -> None:
        print(f"{text:<79}", end=end, file=sys.stderr, flush=True)


def in_threads(work: Callable[[T], Iterable[R]], items: Iterable[T], threads: int) -> Iterator[R]:
    """What `work` yields for each of the items, as it comes; raises what it raises. Ctrl-C does not wait for work that has begun."""
    todo = iter([*items])  # threads may share the iterator of a list
    results: queue.SimpleQueue[R | Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            for item in todo:
                for result in work(item):
                    results.put(result)
        except Exception as error:
            results.put(error)
        results.put(None)  # this thread is done

    for _ in range(threads):
        threading.Thread(target=run, daemon=True).start()
    try:
        while threads:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            if result is None:
                threads -= 1
            else:
                yield result
    finally:
        list(todo)  # nobody wants the rest


def shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with i from 0 to n-1, e.g. 0/4")
    return int(match[1]), int(match[2])
