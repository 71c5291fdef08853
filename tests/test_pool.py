"""Several extractors: which is asked, what happens when one refuses, dies, hangs or joins."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from processes import wait_for
from tiny import write_recipe

from configs.load import load
from extract.pool import ExtractionError, Pool


class Fake:
    """An extractor that says what it is told to, and can be held up."""

    def __init__(self, folder, name: str):
        self.asked, self.status, self.cause, self.go = 0, 200, None, threading.Event()
        self.go.set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                fake.asked += 1
                fake.go.wait(30)
                body = json.dumps({"choices": []} if fake.status == 200 else {"error": {"type": fake.cause, "message": name}}).encode()
                self.send_response(fake.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                """Not in the test's output."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.file = folder / f"{name}.json"
        self.file.write_text(json.dumps({"url": f"http://127.0.0.1:{self.server.server_port}", "pid": 1}))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def die(self) -> None:
        """Its registration stays."""
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def run(tmp_path):
    config = load(write_recipe(tmp_path, tmp_path / "none", {"pool": {"deadline_s": 5}}))
    folder = config.run_dir / "extractors"
    folder.mkdir(parents=True)
    fakes = [Fake(folder, name) for name in ("a", "b")]
    pool = Pool(config)
    yield pool, folder, fakes
    pool.close()
    for fake in fakes:
        fake.go.set()
        fake.die()


def test_asks_go_where_fewest_tokens_are_outstanding(run):
    pool, _, (a, b) = run
    a.go.clear()
    b.go.clear()
    with ThreadPoolExecutor(8) as askers:
        asks = [askers.submit(pool.make, "r/0/0/0", [1] * 300)]
        wait_for(lambda: a.asked + b.asked == 1)
        long, short = (a, b) if a.asked else (b, a)
        for count in range(1, 4):  # three short ones together are less than the long one
            asks.append(askers.submit(pool.make, f"r/0/{count}/0", [1] * 50))
            wait_for(lambda count=count: short.asked == count)
        assert long.asked == 1  # it makes no progress, and gets no more
        a.go.set()
        b.go.set()
        [ask.result() for ask in asks]


@pytest.mark.parametrize("how", ["draining", "dead"])
def test_what_one_has_not_taken_goes_to_another(run, how):
    pool, _, (a, b) = run
    a.status, a.cause = 503, "draining"
    if how == "dead":
        a.die()
        a.die = lambda: None
    for _ in range(6):
        pool.make("r/0/0/0", [1])
    assert b.asked == 6 and (a.asked <= 1 or how == "draining")


def test_one_that_fails_is_left_alone_and_comes_back(run):
    pool, _, (a, b) = run
    b.file.unlink()
    a.status, a.cause = 500, "engine"
    with pytest.raises(ExtractionError) as error:
        pool.make("r/0/0/0", [1])
    assert error.value.cause == "engine" and a.asked == 1  # it had taken it: not asked of another under this name
    b.file.write_text(json.dumps({"url": f"http://127.0.0.1:{b.server.server_port}", "pid": 1}))  # one joins
    for _ in range(5):
        pool.make("r/0/0/0", [1])
    assert (a.asked, b.asked) == (1, 5)
    a.status = 200
    b.file.unlink()
    pool.make("r/0/0/0", [1])  # the only one left, quarantine or not
    assert a.asked == 2


def test_causes_of_the_sample_do_not_count_against_the_extractor(run):
    pool, _, (a, b) = run
    b.file.unlink()
    a.status, a.cause = 422, "non_finite"
    with pytest.raises(ExtractionError):
        pool.make("r/0/0/0", [1])
    assert not pool._failures.total()
    a.file.unlink()
    with pytest.raises(ExtractionError) as error:
        pool.make("r/0/0/0", [1])
    assert error.value.cause == "no_extractor"
