"""The HTTP server of the transformers engine: the extractor's protocol in one process."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from contextlib import suppress

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from configs.schema import Config
from extract.engine_transformers import Ask, TransformersEngine
from extract.pool import ExtractionError
from extract.protocol import read_body, refusal, register, registration
from extract.render import load_tokenizer
from store.objects import Gone, open_store
from store.sample import discard

REPORT_S = 10.0


class Extractor:
    """The HTTP side of an engine: counts what it has taken, refuses while it drains."""

    def __init__(self, engine: TransformersEngine, tokenizer):
        self.engine, self.tokenizer = engine, tokenizer
        self.draining = False
        self.taken = 0
        self.refused: Counter[str] = Counter()
        self.reported, self.reported_at = Counter[str](), time.monotonic()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/contract", self.contract),
                Route("/health", self.health),
            ]
        )

    async def completions(self, request: Request) -> Response:
        self.taken += 1
        try:
            if self.draining:
                raise ExtractionError("draining", "the extractor is draining")
            body = read_body(await request.body())
            if body.kv_transfer_params and body.kv_transfer_params.include_output_tokens:
                raise ExtractionError("bad_request", "include_output_tokens: only vLLM makes states of what it generates")
            ask = Ask(body)
            self.engine.submit(ask)
            token_ids, reason = await self._outcome(request, ask)
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
            choice = {"index": 0, "token_ids": token_ids, "text": text, "finish_reason": reason}
            usage = {"prompt_tokens": len(body.prompt), "completion_tokens": len(token_ids)}
            return JSONResponse({"choices": [choice], "usage": usage})
        except ExtractionError as error:
            self.refused[error.cause] += 1
            return refusal(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        finally:
            self.taken -= 1

    async def contract(self, _request: Request) -> Response:
        return JSONResponse(self.engine.contract.model_dump(mode="json"))

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200 if self.engine.alive() else 503)

    async def _outcome(self, request: Request, ask: Ask) -> tuple[list[int], str]:
        """Wait for the engine. An asker that goes away meanwhile gets nothing, and nothing of it stays in the store."""
        answer = asyncio.wrap_future(ask.answer)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # known, whether or not somebody still waits
        gone = asyncio.ensure_future(request.receive())  # the body has been read: what comes next is the end
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)  # both may have come at once
        if not gone.done():
            gone.cancel()
            return await answer
        ask.abandoned = True
        await asyncio.wait({answer})
        if answer.exception() is None and ask.body.sample:
            with suppress(Gone):  # nobody will fetch it: the store sweeps such
                await asyncio.to_thread(discard, self.engine.store, ask.body.sample)
        raise ClientDisconnect

    def report(self) -> None:
        """Log what was done since the last report, if anything was; every REPORT_S seconds."""
        counts, now = self.engine.counts.copy(), time.monotonic()
        if (seconds := now - self.reported_at) < REPORT_S:
            return
        if done := counts - self.reported:
            logging.info(
                "%d samples (%.0f tok/s), %d completions (%.0f tok/s), %d waiting, refused so far: %s",
                done["samples"],
                done["tokens_made"] / seconds,
                done["completions"],
                done["tokens_generated"] / seconds,
                self.engine.waiting(),
                dict(self.refused) or "none",
            )
        self.reported, self.reported_at = counts, now


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
        self.registration = registration(config.run_dir)
        self.deadline = float("inf")  # of draining
        self.unfinished = 0

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
        self.extractor.report()
        engine = self.extractor.engine
        if self.extractor.draining:
            self.registration.unlink(missing_ok=True)
            if time.monotonic() > self.deadline and not self.unfinished:
                self.unfinished = self.extractor.taken
                engine.stop()
        if not engine.alive() or (self.extractor.draining and not self.extractor.taken):
            self.should_exit = True
        return await super().on_tick(counter)


def run(config: Config) -> int:
    """Serve until SIGTERM, after draining; the exit status.

    Raises OSError, RenderError, StoreError, ValueError, VerifierError where the verifier cannot be served.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s extractor: %(message)s", datefmt="%H:%M:%S", force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    torch.set_num_threads(config.extract.threads)
    tokenizer = load_tokenizer(config.verifier)
    engine = TransformersEngine(config, open_store(config.store, share=1.0))
    server = Server(Extractor(engine, tokenizer), config)
    logging.info("%s serves %s in %s, taps %s", server.url, config.verifier.path, config.verifier.dtype, list(config.draft.taps))
    try:
        server.run(sockets=[server.socket])
    finally:
        server.registration.unlink(missing_ok=True)
    if unfinished := server.unfinished or server.extractor.taken:
        logging.error("%d asks were not finished within extract.drain_s (%g s)", unfinished, server.drain_s)
        return 1
    if not engine.alive():
        logging.error("the engine's thread has died")
        return 1
    engine.stop()
    engine.join()
    logging.info("drained")
    return 0
