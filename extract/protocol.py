"""What the servers of both engines have in common: the causes of a refusal on the wire, and how an extractor makes itself known."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

# Every other cause is the engine's or the store's fault.
STATUS = {"bad_request": 400, "too_long": 400, "unknown_tokens": 400, "non_finite": 422, "draining": 503, "no_room": 507}


def refusal(cause: str, message: str) -> tuple[int, dict]:
    """HTTP status and body of a request that is not served."""
    status = STATUS.get(cause, 500)
    return status, {"error": {"message": message, "type": cause, "code": status}}


def register(run_dir: Path, url: str) -> Path:
    """Tell the run where this extractor answers, once it does; the file is to be removed when it drains.

    A reader sees the whole file or none.
    """
    path = run_dir / "extractors" / f"{socket.gethostname()}-{os.getpid()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    partial.replace(path)
    return path
