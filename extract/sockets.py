"""Where vLLM's processes talk to each other: Unix sockets, which it leaves behind."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from store.files import try_lock

LONGEST = 45  # bytes of the folder for temporary files: a socket's path has 107, and 62 are ours and vLLM's


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder for sockets among this node's temporary files. It goes in the end; what a killed process left, with the next."""
    where = Path(tempfile.gettempdir())
    if len(os.fsencode(where)) > LONGEST:
        where = Path("/tmp")
    name = f"dspark-{zlib.crc32(os.uname().nodename.encode()):08x}-"  # nodes that share the place need not see each other's locks
    for left in where.glob(f"{name}*"):
        with suppress(OSError), _opened(left) as descriptor:  # another user's, or gone meanwhile
            if try_lock(descriptor):
                _remove(left)
    hidden = Path(tempfile.mkdtemp(prefix=f".{name}", dir=where))
    with _opened(hidden) as descriptor:
        with suppress(OSError):  # no locks there: then none is taken for a dead one's, either
            try_lock(descriptor)
        folder = hidden.rename(hidden.with_name(hidden.name[1:]))  # locked before anybody looks at it
        try:
            yield folder
        finally:
            with suppress(OSError):
                _remove(folder)


def _remove(folder: Path) -> None:
    """Sockets only: what else is there is not ours."""
    for path in folder.iterdir():
        if path.is_socket():
            path.unlink(missing_ok=True)
    folder.rmdir()


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
