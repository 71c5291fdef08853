"""One extractor: an HTTP server around the engine that runs the verifier.

`python -m extract.serve CONFIG`

POST /v1/completions continues token ids; with `kv_transfer_params: {"sample": NAME}` it makes their states instead, and 200
means that they can be read from the store. Every refusal says its cause. GET /contract and /health. It binds a free port,
registers in run_dir/extractors once it can answer, and on SIGTERM finishes what it has taken and exits 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import uvicorn
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from configs.schema import Config, Positive, config_argument, parse
from extract.engine_transformers import Ask, Completion, TransformersEngine
from extract.pool import ExtractionError
from extract.render import RenderError, load_tokenizer
from store.objects import StoreError, open_store
from store.sample import discard
from store.verifier import VerifierError

STATUS = {"bad_request": 400, "too_long": 400, "unknown_tokens": 400, "non_finite": 422, "draining": 503, "no_room": 507}  # else 500
REPORT_S = 10.0


class Transfer(BaseModel):
    sample: str


class Body(BaseModel):
    """What a client may say; other keys of the OpenAI protocol are ignored."""

    prompt: list[int]
    max_tokens: Positive = 16
    temperature: Annotated[float, Field(ge=0)] = 1.0
    seed: int | None = None
    kv_transfer_params: Transfer | None = None


class Extractor:
    """The HTTP side of an engine: counts what it has taken, refuses while it drains."""

    def __init__(self, engine: TransformersEngine, tokenizer):
        self.engine, self.tokenizer = engine, tokenizer
        self.draining = False
        self.taken = 0
        self.refused: Counter[str] = Counter()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/contract", self.contract),
                Route("/health", self.health),
            ]
        )

    async def completions(self, request: Request) -> Response:
        if self.draining:
            return self._refuse("draining", "the extractor is draining")
        self.taken += 1
        try:
            body = Body.model_validate_json(await request.body())
            name = body.kv_transfer_params and body.kv_transfer_params.sample
            ask = Ask(body.prompt, body.max_tokens, body.temperature, body.seed, name)
            self.engine.submit(ask)
            return self._answer(ask, await self._outcome(request, ask))
        except ValidationError as error:
            first = error.errors()[0]
            return self._refuse("bad_request", f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": "))
        except ExtractionError as error:
            return self._refuse(error.cause, str(error))
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        finally:
            self.taken -= 1

    async def contract(self, _request: Request) -> Response:
        return JSONResponse(self.engine.contract.model_dump(mode="json"))

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200 if self.engine.alive() else 503)

    async def _outcome(self, request: Request, ask: Ask) -> Completion:
        """Wait for the engine. An asker that goes away meanwhile gets nothing, and nothing of it stays in the store."""
        answer = asyncio.wrap_future(ask.answer)
        gone = asyncio.ensure_future(request.receive())  # the body has been read: what comes next is the end
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)  # both may have come at once
        if not gone.done():
            gone.cancel()
            return await answer
        ask.abandoned = True
        await asyncio.wait({answer})
        if ask.sample and answer.exception() is None:
            await asyncio.to_thread(discard, self.engine.store, ask.sample)
        raise ClientDisconnect

    def _answer(self, ask: Ask, completion: Completion) -> Response:
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        choice = {"index": 0, "token_ids": completion.token_ids, "text": text, "finish_reason": completion.finish_reason}
        usage = {"prompt_tokens": len(ask.prompt), "completion_tokens": len(completion.token_ids)}
        return JSONResponse({"choices": [choice], "usage": usage})

    def _refuse(self, cause: str, message: str) -> Response:
        self.refused[cause] += 1
        code = STATUS.get(cause, 500)
        return JSONResponse({"error": {"message": message, "type": cause, "code": code}}, code)


class Server(uvicorn.Server):
    """uvicorn, but SIGTERM and SIGINT drain first (a second one ends it at once), and the port is registered while it answers."""

    def __init__(self, extractor: Extractor, config: Config):
        # Connections that wait for the next ask are kept longer than clients keep them, so that no ask meets a closing one.
        options = uvicorn.Config(extractor.app(), lifespan="off", log_config=None, access_log=False, timeout_keep_alive=60)
        options.timeout_graceful_shutdown = 2  # nothing is left then, unless it was told to end at once
        super().__init__(options)
        self.extractor, self.drain_s = extractor, config.extract.drain_s
        self.socket = socket.create_server((config.extract.host, 0), backlog=1024)
        self.url = f"http://{config.extract.host}:{self.socket.getsockname()[1]}"
        self.registration = config.run_dir / "extractors" / f"{socket.gethostname()}-{os.getpid()}.json"
        self.deadline = float("inf")  # of draining
        self.unfinished = 0
        self.report = _report(extractor)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        register(self.registration, self.url)

    def handle_exit(self, sig: int, frame) -> None:
        if self.extractor.draining:
            self.should_exit = True
            return
        self.extractor.draining = True
        self.deadline = time.monotonic() + self.drain_s

    async def on_tick(self, counter: int) -> bool:
        self.report()
        if self.extractor.draining:
            self.registration.unlink(missing_ok=True)
            if time.monotonic() > self.deadline and not self.unfinished:
                self.unfinished = self.extractor.taken
                self.extractor.engine.stop()
            if not self.extractor.taken:
                self.should_exit = True
        return await super().on_tick(counter)


def register(path: Path, url: str) -> None:
    """Tell the run where this extractor answers. A reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    partial.replace(path)


def _report(extractor: Extractor):
    """A function that logs what was done in the last REPORT_S seconds, if anything was."""
    before, since = Counter(), time.monotonic()

    def report() -> None:
        nonlocal before, since
        now, counts = time.monotonic(), extractor.engine.counts
        if now - since < REPORT_S:
            return
        done, seconds = counts - before, now - since
        if done:
            logging.info(
                "%d samples (%.0f tok/s), %d completions (%.0f tok/s), %d waiting, refused so far: %s",
                done["samples"],
                done["tokens_made"] / seconds,
                done["completions"],
                done["tokens_generated"] / seconds,
                extractor.engine.waiting(),
                dict(extractor.refused) or "none",
            )
        before, since = counts.copy(), now

    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="extract.serve", description=__doc__.splitlines()[0])
    config_argument(parser)
    _, config = parse(parser, argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s extractor: %(message)s", datefmt="%H:%M:%S", force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    torch.set_num_threads(config.extract.threads)
    try:
        tokenizer = load_tokenizer(config.verifier)
        engine = TransformersEngine(config, open_store(config.store))
        server = Server(Extractor(engine, tokenizer), config)
    except (OSError, RenderError, StoreError, ValueError, VerifierError) as error:
        print(f"extract.serve: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    logging.info("%s serves %s in %s, taps %s", server.url, config.verifier.path, config.verifier.dtype, list(config.draft.taps))
    try:
        server.run(sockets=[server.socket])
    finally:
        server.registration.unlink(missing_ok=True)
    if unfinished := server.unfinished or server.extractor.taken:
        logging.error("%d asks were not finished within extract.drain_s (%g s)", unfinished, server.drain_s)
        return 1
    engine.stop()
    engine.join()
    logging.info("drained")
    return 0


if __name__ == "__main__":
    sys.exit(main())
