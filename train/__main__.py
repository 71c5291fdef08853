"""`torchrun … -m train CONFIG`: train a draft. `python -m train CONFIG --describe`: its tensors and parameters, not allocated."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from configs.command import command
from configs.load import parse


@command("train")
def main() -> None:
    parser = argparse.ArgumentParser(prog="train", description=__doc__)
    parser.add_argument("--from-draft", type=Path, metavar="DIR", help="start a new run from a checkpoint or a published draft")
    parser.add_argument("--describe", action="store_true", help="print the draft's tensors and parameters and stop")
    args, config = parse(parser)
    if args.describe:
        from train.contract import DraftContract
        from train.formats import describe

        print(describe(DraftContract.resolve(config)))
        return
    heard: list[int] = []  # SIGUSR1: time is running out, SIGTERM: stop; a checkpoint first, both times
    for signum in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(signum, lambda number, _frame: heard.append(number))
    from train.loop import train

    train(config, args.from_draft, stop=lambda: bool(heard))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # while Python ends, a handler would be the default one again: death


if __name__ == "__main__":
    sys.exit(main())
