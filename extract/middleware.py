"""The door of vLLM's HTTP server (`--middleware extract.middleware.Gate`): 200 means readable, and finite.

vLLM answers a request before its ranks have looked at its states and put them. So each answer is held here until the
connector's verdict. Also here: reasons for prompts that cannot be served, 503 while draining, `/contract`, and the registration
in the run's folder. Everything else is vLLM's own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import uuid

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from vllm.platforms import current_platform

from configs.schema import Config
from extract.engine_vllm import state_contract
from extract.pool import ExtractionError
from extract.protocol import check_prompt, read_body, refusal, register, registration
from store.objects import StoreError, open_store
from store.sample import discard

log = logging.getLogger(__name__)

LOOK_S = 1.0  # how often a held answer looks whether the engine still lives
VERDICT_BYTES = 1 << 16


class Gate:
    """ASGI middleware, the outermost. Its state is set up at the application's start, when the engine is up."""

    def __init__(self, app):
        self.app = app
        self.waiting: dict[str, asyncio.Future[ExtractionError | None]] = {}  # ticket -> its verdict: None for good
        self.in_flight = 0
        self.draining = False
        self.tasks: set[asyncio.Task] = set()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._at_startup(scope["app"].state, send))
        elif scope["type"] == "http" and scope["path"] == "/contract":
            await JSONResponse(self.contract.model_dump(mode="json"))(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/v1/completions" and scope["method"] == "POST":
            await self._complete(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    # one request

    async def _complete(self, scope, receive, send) -> None:
        self.in_flight += 1
        try:
            if self.draining:
                raise ExtractionError("draining", "this extractor is going away, ask another one")
            await self._hold(scope, receive, send, *self._ticket(await Request(scope, receive).body()))
        except ExtractionError as error:
            await refusal(error)(scope, receive, send)
        except ClientDisconnect:
            return
        finally:
            self.in_flight -= 1

    def _ticket(self, body: bytes) -> tuple[bytes, str, str | None]:
        """The body for the engine, the ticket that its verdict will carry, and the sample that the request names, if any.

        Raises ExtractionError where the engine could not do what is asked.
        """
        ask = read_body(body)
        check_prompt(ask.prompt, ask.max_tokens, self.max_model_len, self.vocab_size)
        if ask.sample in self.waiting:
            raise ExtractionError("bad_request", f"{ask.sample} is being made already: each attempt has a name of its own")
        if ask.temperature and current_platform.is_cpu():  # its kernel for speculative decoding leaves temperatures unwritten
            raise ExtractionError("bad_request", "temperature: vLLM 0.32 on a CPU does not sample beside state extraction, it must be 0")
        if ask.sample:
            return body, ask.sample, ask.sample
        ticket = uuid.uuid4().hex
        return json.dumps({**json.loads(body), "kv_transfer_params": {"ticket": ticket}}).encode(), ticket, None

    async def _hold(self, scope, receive, send, body: bytes, ticket: str, sample: str | None) -> None:
        """Hold the answer until the verdict. Whoever asked and does not get the 200 leaves nothing in the store."""
        verdict = self.waiting[ticket] = asyncio.get_running_loop().create_future()
        answer: list[dict] = []
        delivered = False

        async def collect(message: dict) -> None:
            answer.append(message)

        try:
            await self.app(scope, _replay(body, receive), collect)
            if not answer:
                return  # the asker has gone, vLLM has aborted the request
            if (status := answer[0]["status"]) != 200:
                raise ExtractionError("engine", f"vLLM answers {status}: {_message(answer)}")
            if await self._asker_waits(verdict, receive):
                if failure := verdict.result():
                    raise failure
                for message in answer:
                    await send(message)
                delivered = True
        finally:
            del self.waiting[ticket]
            if sample and not delivered and verdict.done() and verdict.result() is None:
                self._discard(sample)

    async def _asker_waits(self, verdict: asyncio.Future, receive) -> bool:
        """Whether the asker is still there when the verdict is. Raises ExtractionError when the engine dies without one."""
        gone = asyncio.ensure_future(receive())  # the body has been read: only a disconnect can come
        try:
            while not verdict.done() and not gone.done():
                await asyncio.wait({verdict, gone}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if self.engine.errored and not verdict.done():
                    raise ExtractionError("engine", "the engine has died")
            return not gone.done()
        finally:
            gone.cancel()

    def _take_verdicts(self) -> None:
        while True:
            try:
                told = json.loads(self.verdicts.recv(VERDICT_BYTES))
            except BlockingIOError:
                return
            ticket, failure = told["ticket"], ExtractionError(told["cause"], told["message"]) if "cause" in told else None
            verdict = self.waiting.get(ticket)
            if verdict is not None and not verdict.done():
                verdict.set_result(failure)
            elif told["published"]:
                self._discard(ticket)  # its asker has gone

    def _discard(self, sample: str) -> None:
        async def remove() -> None:
            try:
                await asyncio.to_thread(discard, self.store, sample)
            except StoreError as error:
                log.warning("%s: nobody wants it, but it could not be removed (%s)", sample, error)

        self._spawn(remove())

    # the server's life

    def _at_startup(self, state, send):
        async def watching(message: dict) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._open(state)
            await send(message)

        return watching

    def _open(self, state) -> None:
        self.engine, vllm_config = state.engine_client, state.vllm_config
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.config = Config.model_validate(extra["config"])
        self.contract = state_contract(vllm_config)
        self.max_model_len, self.vocab_size = vllm_config.model_config.max_model_len, vllm_config.model_config.get_vocab_size()
        self.store = open_store(self.config.store)
        self.verdicts = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.verdicts.bind("\0" + extra["verdicts"])
        loop = asyncio.get_running_loop()
        loop.add_reader(self.verdicts, self._take_verdicts)
        loop.add_signal_handler(signal.SIGTERM, self._drain)  # in the place of vLLM's, which would stop at once
        self.registration = registration(self.config.run_dir)
        self._spawn(self._register(state))

    async def _register(self, state) -> None:
        while not state.server.started:
            await asyncio.sleep(0.05)
        port = state.server.servers[0].sockets[0].getsockname()[1]
        if not self.draining:
            register(self.registration, f"http://{self.config.extract.host}:{port}")

    def _drain(self) -> None:
        if not self.draining:
            self.draining = True
            self.registration.unlink(missing_ok=True)
            self._spawn(self._finish())

    async def _finish(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.extract.drain_s
        while self.in_flight and loop.time() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.gather(*self.tasks - {asyncio.current_task()}, return_exceptions=True)
        log.info("drained, %d requests are left", self.in_flight)
        signal.raise_signal(signal.SIGINT)  # the other signal that vLLM shuts down on

    def _spawn(self, coroutine) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self.tasks.discard)


def _replay(body: bytes, receive):
    """`receive` for the application behind: the body once more, then what comes."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> dict:
        return unread.pop() if unread else await receive()

    return again


def _message(answer: list[dict]) -> str:
    """One line out of vLLM's own error."""
    body = b"".join(message.get("body", b"") for message in answer[1:])
    try:
        return " ".join(json.loads(body)["error"]["message"].split())
    except (ValueError, KeyError, TypeError, AttributeError):
        return body.decode(errors="replace")[:200]
