"""How every command ends where it cannot do its work: with one line that says why, and no traceback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable


class PlainError(Exception):
    """Its message, one line, is all that whoever runs a command needs to know."""


def command(name: str, *others: type[Exception], status: int = 1) -> Callable:
    """Decorates `main` of the command `name`: a PlainError, an error of the operating system and `others` end it with one line and
    `status`."""

    def decorate(main: Callable[..., int | None]) -> Callable[..., int]:
        @functools.wraps(main)
        def run(*args, **kwargs) -> int:
            try:
                return main(*args, **kwargs) or 0
            except (PlainError, OSError, *others) as error:
                print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
                return status

        return run

    return decorate
