"""An extractor's life, whatever its engine: draining, bounds, and what an asker is told. The transformers engine, and no server where
none is needed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from test_extractor_conformance import tokens
from tiny import python_environment, start_extractor, write_recipe

from configs.load import load
from extract.engine_transformers import Ask, TransformersEngine
from extract.hf import HFVerifier
from extract.obtain import NoStates, StateSource
from extract.pool import ExtractionError, Pool
from extract.protocol import Body, register
from extract.serve import main as serve
from extract.server import Extractor
from store.objects import open_store

pytestmark = pytest.mark.integration


def test_drain_finishes_what_was_taken_and_refuses_the_rest(tiny_verifier, tmp_path):
    running = start_extractor(write_recipe(tmp_path, tiny_verifier("llama")))
    pool, store = Pool(running.config), open_store(running.config.store)
    try:
        count, causes = 12, set()
        with ThreadPoolExecutor(2 * count) as askers:
            completions = [askers.submit(pool.complete, tokens(100, index), 60) for index in range(count)]
            samples = [askers.submit(pool.make, f"drain/0/{index}/0", tokens(350, index)) for index in range(count)]
            with httpx.Client(base_url=running.url, trust_env=False) as late:
                time.sleep(0.5)
                running.process.send_signal(signal.SIGTERM)
                while running.process.poll() is None:
                    try:
                        answer = late.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
                    except httpx.TransportError:
                        break
                    causes.add((answer.status_code, answer.json().get("error", {}).get("type")))
        assert running.process.wait(60) == 0, running.log.read_text()
        assert (503, "draining") in causes
        assert not list((running.config.run_dir / "extractors").glob("*"))
        finished = [future for future in completions + samples if future.exception() is None]
        assert len(finished) > count
        for future in completions + samples:  # what came too late says so; nothing is refused after it was taken
            assert future in finished or "the extractor is draining" in str(future.exception())
        for index, future in enumerate(samples):
            if future in finished:
                store.read(f"drain/0/{index}/0/manifest")
        with pytest.raises(ExtractionError) as error:
            pool.complete([5], 1)
        assert error.value.cause == "no_extractor"
    finally:
        running.process.kill()


def test_a_drain_that_takes_too_long_refuses_the_rest_and_fails(tiny_verifier, tmp_path):
    running = start_extractor(write_recipe(tmp_path, tiny_verifier("llama"), {"extract": {"drain_s": 0}}))
    pool = Pool(running.config)
    try:
        with ThreadPoolExecutor(8) as askers:
            taken = [askers.submit(pool.complete, tokens(10, index), 390) for index in range(8)]
            time.sleep(0.5)
            running.process.send_signal(signal.SIGTERM)
        assert {future.exception().cause for future in taken if future.exception()} == {"draining"}
        assert running.process.wait(60) == 1
        assert "were not finished within extract.drain_s" in running.log.read_text()
    finally:
        running.process.kill()


def test_what_nobody_waits_for_any_more_is_no_noise(caplog):
    """An asker that was cancelled while its answer was on the way, as happens when the server is told to end at once."""

    class Engine:
        def submit(self, ask):
            self.ask = ask

    class Asked:
        async def body(self):
            return b'{"prompt": [5]}'

        async def receive(self):
            await asyncio.sleep(60)

    async def cancelled() -> None:
        engine = Engine()
        asker = asyncio.ensure_future(Extractor(engine, None).completions(Asked()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asker
        del asker
        engine.ask.fail("draining", "too late")
        await asyncio.sleep(0.01)
        del engine
        gc.collect()

    asyncio.run(cancelled())
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize(("kv_bytes", "rows"), [(2 << 20, 2), (1, 1), (1 << 30, 8)])
def test_the_cache_of_rows_has_a_bound(tiny_verifier, tmp_path, kv_bytes, rows):
    config = load(write_recipe(tmp_path, tiny_verifier("llama")), [f"extract.kv_bytes={kv_bytes}"])
    engine = TransformersEngine(config, open_store(config.store))
    asks = [Ask(Body(prompt=tokens(5, seed), max_tokens=4, temperature=0)) for seed in range(5)]
    for ask in asks:
        engine.submit(ask)
    answers = [ask.answer.result(60)[0] for ask in asks]
    cached = [tensor for tensor in engine._slots._tensors()]
    assert {len(tensor) for tensor in cached} == {rows} and len(set(map(tuple, answers))) > 1
    assert sum(tensor.nbytes for tensor in cached) <= max(kv_bytes, 401 * engine.verifier.token_bytes())
    engine.stop()
    engine.join()


def test_a_sample_that_no_store_so_small_can_hold_is_not_waited_for(tiny_verifier, tmp_path):
    config = load(write_recipe(tmp_path, tiny_verifier("llama")), ["store.bytes=10000"])
    source = StateSource(config, None)
    source.contract = HFVerifier(config.verifier.path, "float32", config.draft.taps).contract
    with pytest.raises(NoStates, match=r"a sample of 50 tokens takes 51200 bytes, store\.bytes is 10000"):
        source.make(tokens(50), source.buffer(50))


@pytest.fixture
def silent(tmp_path, tiny_verifier):
    """A pool whose extractor takes connections and says nothing, and its socket."""
    config = load(write_recipe(tmp_path, tiny_verifier("llama")), ["pool.deadline_s=0.5"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        register(config.run_dir / "extractors" / "silent.json", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield Pool(config), server


def test_a_slow_extractor_misses_its_deadline_and_a_dead_one_is_unreachable(silent):
    pool, server = silent
    with pytest.raises(ExtractionError, match="no answer within") as error:
        pool.complete([5], 1)
    assert error.value.cause == "deadline"
    server.close()
    with pytest.raises(ExtractionError) as error:
        pool.make("dead/0/0/0", [5])
    assert error.value.cause == "unreachable"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"verifier": {"path": "/nowhere"}}, "no such folder"), ({"draft": {"taps": [1, 4]}}, "has 4 layers, so a tap is one of 0..3")],
)
def test_a_verifier_that_cannot_be_served_is_one_line(tiny_verifier, tmp_path, capsys, overrides, message):
    assert serve([str(write_recipe(tmp_path, tiny_verifier("llama"), overrides))]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("extract.serve: ") and message in line


def test_the_pool_is_light():
    """Trainers' control plane: it must not pull in models, engines or data sets."""
    code = "import sys, extract.pool; print([name for name in ('torch', 'transformers', 'vllm', 'datasets') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=python_environment())
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
