"""The extractor's protocol, as both engines' servers keep it: what may be asked, how it is refused, where an extractor is found.

POST /v1/completions continues token ids; with `kv_transfer_params: {"sample": NAME}` it makes their states too, and 200 means
that they can be read from the store. Every refusal says its cause. GET /contract and /health.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveInt, ValidationError
from starlette.responses import JSONResponse

from extract.pool import ExtractionError
from store.files import write

STATUS = {"bad_request": 400, "too_long": 400, "unknown_tokens": 400, "non_finite": 422, "draining": 503, "no_room": 507}  # else 500


class Transfer(BaseModel):
    sample: str
    include_output_tokens: bool = False


class Body(BaseModel):
    """What a client may say; other keys of the OpenAI protocol are the engine's business."""

    prompt: list[int]
    max_tokens: PositiveInt = 16
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # 0: of all tokens
    seed: int | None = None
    n: Literal[1] = 1
    kv_transfer_params: Transfer | None = None

    @property
    def sample(self) -> str | None:
        return self.kv_transfer_params and self.kv_transfer_params.sample


def read_body(text: bytes) -> Body:
    """Raises ExtractionError: no JSON object that can be served."""
    try:
        return Body.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise ExtractionError("bad_request", f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")) from None


def check_prompt(prompt: list[int], max_tokens: int, max_model_len: int, vocab_size: int) -> None:
    """Raises ExtractionError where the verifier cannot take these tokens and generate so many."""
    if not prompt:
        raise ExtractionError("bad_request", "prompt: no tokens")
    if len(prompt) + max_tokens > max_model_len:
        raise ExtractionError("too_long", f"{len(prompt)} tokens and {max_tokens} to generate, extract.max_model_len is {max_model_len}")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ExtractionError("unknown_tokens", f"a token is outside 0..{vocab_size - 1}")


def refusal(error: ExtractionError) -> JSONResponse:
    status = STATUS.get(error.cause, 500)
    return JSONResponse({"error": {"message": str(error), "type": error.cause, "code": status}}, status)


def registration(run_dir: Path) -> Path:
    """This process's file in the run's folder: there while it answers, removed when it begins to drain."""
    return run_dir / "extractors" / f"{os.environ.get('EXTRACTOR') or f'{socket.gethostname()}-{os.getpid()}'}.json"


def register(path: Path, url: str) -> None:
    """Tell the run where this extractor answers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps({"url": url, "pid": os.getpid()}))
