"""What every engine must do behind the extractor's protocol: the same cases for each, against a real server process."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from tiny import POISON, VOCAB

from extract.hf import HFVerifier
from extract.pool import ExtractionError, Pool
from store.objects import open_store
from store.sample import discard, fetch

pytestmark = pytest.mark.integration
HIDDEN = 64


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def running(request):
    return request.getfixturevalue({"transformers": "extractor", "vllm": "vllm_extractor"}[request.param])


@pytest.fixture(scope="module")
def pool(running):
    pool = Pool(running.config)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def store(running):
    return open_store(running.config.store)


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    store = request.getfixturevalue("store") if "running" in request.fixturenames else None  # some tests need no server
    yield
    if store is not None:
        assert store.usage().keys == 0 and store.usage().bytes == 0


@pytest.fixture(scope="module")
def verifier(running):
    return HFVerifier(running.config.verifier.path, running.config.verifier.dtype, running.config.draft.taps)


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB - 2, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def read(store, pool, name: str, token_ids: list[int]) -> torch.Tensor:
    contract = pool.contract()
    out = torch.empty(len(token_ids), len(contract.taps) + 1, HIDDEN, dtype=getattr(torch, contract.dtype))
    fetch(store, name, contract, token_ids, out)
    return out


def refusal(running, status: int, **body) -> dict:
    answer = running.ask(**{"max_tokens": 1, "temperature": 0, **body})
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == status, answer.text
    assert "\n" not in error["message"]
    return error


def sample(name: str) -> dict:
    return {"kv_transfer_params": {"sample": name}}


def test_contract_is_the_recipes(running, pool, verifier):
    contract = pool.contract()
    assert contract.engine["name"] == running.config.extract.engine
    assert contract.model_copy(update={"engine": {}}) == verifier.contract.model_copy(update={"engine": {}})
    assert contract.taps == running.config.draft.taps and contract.dtype == running.config.verifier.dtype


@pytest.mark.parametrize("lengths", [(1,), (57,), (3, 17, 9, 1, 40, 12, 200, 8)])
def test_states_are_hugging_faces_alone_and_in_a_batch(pool, store, verifier, lengths):
    asked = [tokens(length, seed) for seed, length in enumerate(lengths)]
    names = [f"states/0/{index}/{len(lengths)}" for index in range(len(asked))]
    with ThreadPoolExecutor(len(asked)) as askers:
        list(askers.map(pool.make, names, asked))
    for name, token_ids in zip(names, asked):
        wanted, got = verifier.prefill([token_ids])[0], read(store, pool, name, token_ids)
        assert float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) < 1e-5
        discard(store, name)


def test_64_at_once_get_their_own(pool, store, verifier):
    asked = [tokens(5 + seed % 23, 100 + seed) for seed in range(64)]

    def round_trip(index: int) -> torch.Tensor:
        name = f"many/0/{index}/0"
        pool.make(name, asked[index])
        states = read(store, pool, name, asked[index])
        discard(store, name)
        return states

    with ThreadPoolExecutor(64) as askers:
        states = list(askers.map(round_trip, range(64)))
    for got, wanted in zip(states, verifier.prefill(asked)):
        assert float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) < 1e-5


def test_64_completions_at_once_are_greedy_and_publish_nothing(pool, verifier):
    """More than the engine has slots; different lengths, so that rows join and leave while others decode."""
    asked = [tokens(1 + seed % 31, 200 + seed) for seed in range(64)]
    wanted = [1 + (7 * seed) % 24 for seed in range(64)]
    with ThreadPoolExecutor(64) as askers:
        answers = list(askers.map(pool.complete, asked, wanted))
    for prompt, count, (response, reason) in zip(asked, wanted, answers):
        assert len(response) == count if reason == "length" else response[-1] in verifier.stop_ids
        last = verifier.prefill([prompt + response])[0][len(prompt) - 1 : -1, -1]
        logits = verifier.model.lm_head(verifier.decoder.norm(last))
        top = logits.topk(2).values
        clear = top[:, 0] - top[:, 1] > 1e-4
        assert torch.equal(logits.argmax(-1)[clear], torch.tensor(response)[clear])


def test_sampling_is_repeatable_whoever_else_runs(running, pool):
    if running.config.extract.engine == "vllm":
        pytest.skip("vLLM 0.32 on a CPU does not sample beside state extraction")
    prompt = tokens(9)
    with ThreadPoolExecutor(12) as askers:
        crowded = list(askers.map(lambda seed: pool.complete(prompt, 20, temperature=0.5, seed=seed), range(12)))
    assert crowded[3] == pool.complete(prompt, 20, temperature=0.5, seed=3)
    assert len({tuple(ids) for ids, _ in crowded}) > 6


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-6}])
def test_sampling_from_the_likeliest_alone_is_greedy(running, pool, sampling):
    if running.config.extract.engine == "vllm":  # on a CPU
        assert refusal(running, 400, prompt=[5], temperature=0.5, **sampling)["type"] == "bad_request"
        return
    prompt = tokens(9)
    assert pool.complete(prompt, 20, temperature=2.0, seed=3, **sampling) == pool.complete(prompt, 20)


def test_answers_carry_text_and_usage(running):
    answer = running.ask(prompt=tokens(4), max_tokens=3, temperature=0, return_token_ids=True).json()
    choice = answer["choices"][0]
    assert len(choice["token_ids"]) == 3 and isinstance(choice["text"], str) and choice["finish_reason"] == "length"
    assert answer["usage"].items() >= {"prompt_tokens": 4, "completion_tokens": 3}.items()


def test_too_long(running, pool, store):
    longest = tokens(running.config.extract.max_model_len - 1)
    pool.make("long/0/0/0", longest)
    discard(store, "long/0/0/0")
    assert refusal(running, 400, prompt=[*longest, 5], **sample("long/0/1/0"))["type"] == "too_long"
    assert refusal(running, 400, prompt=tokens(300), max_tokens=102)["type"] == "too_long"


@pytest.mark.parametrize("prompt", [[5, VOCAB], [5, -1]])
def test_unknown_tokens(running, prompt):
    assert refusal(running, 400, prompt=prompt, **sample("unknown/0/0/0"))["type"] == "unknown_tokens"
    assert refusal(running, 400, prompt=prompt)["type"] == "unknown_tokens"


@pytest.mark.parametrize(
    "body", [{}, {"prompt": []}, {"prompt": "text"}, {"prompt": [5], "max_tokens": 0}, {"prompt": [5], "temperature": -1}]
)
def test_bad_requests(running, body):
    assert refusal(running, 400, **body)["type"] == "bad_request"


def test_no_room(running, pool, store):
    free = running.config.store.bytes - 20_000
    store.put("filler/0", memoryview(bytes(free)))
    assert refusal(running, 507, prompt=tokens(50), **sample("room/0/0/0"))["type"] == "no_room"
    store.remove(["filler/0"])
    pool.make("room/0/0/1", tokens(50))
    discard(store, "room/0/0/1")


def test_no_room_for_the_manifest_leaves_nothing(running, store):
    states = 20 * 4 * HIDDEN * 4
    store.put("filler/1", memoryview(bytes(running.config.store.bytes - states - 10)))
    assert refusal(running, 507, prompt=tokens(20), **sample("manifest/0/0/0"))["type"] == "no_room"
    assert store.usage().keys == 1
    store.remove(["filler/1"])


def test_a_put_that_fails(running, pool, store):
    folder = running.config.store.path
    hidden = folder.with_name("hidden")
    folder.rename(hidden)
    folder.write_text("not a folder")
    try:
        assert refusal(running, 500, prompt=tokens(9), **sample("put/0/0/0"))["type"] == "store_gone"
    finally:
        folder.unlink()
        hidden.rename(folder)
    pool.make("put/0/0/1", tokens(9))
    discard(store, "put/0/0/1")


def test_a_name_is_used_once(running, pool, store):
    pool.make("once/0/0/0", tokens(9))
    assert refusal(running, 400, prompt=tokens(8), **sample("once/0/0/0"))["type"] == "bad_request"
    read(store, pool, "once/0/0/0", tokens(9))
    discard(store, "once/0/0/0")


def test_non_finite_states_cost_their_sample_alone(running, pool, store):
    good, bad = tokens(30), [*tokens(20), POISON, 5]
    with ThreadPoolExecutor(9) as askers:
        poisoned = askers.submit(pool.make, "finite/0/0/0", bad)
        names = [f"finite/0/{index}/0" for index in range(1, 9)]
        list(askers.map(pool.make, names, [good] * 8))
    with pytest.raises(ExtractionError) as error:
        poisoned.result()
    assert error.value.cause == "non_finite"
    assert refusal(running, 422, prompt=bad, **sample("finite/0/0/1"))["type"] == "non_finite"
    for name in names:
        read(store, pool, name, good)
        discard(store, name)


def test_non_finite_completions_leave_their_slot_clean(running, pool):
    good, bad = tokens(3), [*tokens(40), POISON, 5]
    before = pool.complete(good, 30)
    for _ in range(3):
        with ThreadPoolExecutor(16) as askers:
            answers = [askers.submit(pool.complete, prompt, 30) for prompt in [bad, good] * 8]
        assert all(answer.result() == before for answer in answers[1::2])
        assert {answer.exception().cause for answer in answers[::2]} == {"non_finite"}


def test_an_asker_that_goes_away_leaves_nothing(running, pool, store):
    address = ("127.0.0.1", int(running.url.rsplit(":", 1)[1]))
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    with ThreadPoolExecutor(8) as askers:
        busy = [f"stayed/0/{index}/0" for index in range(8)]  # so that nothing is answered before its asker has gone
        stayed = [askers.submit(pool.make, name, tokens(400)) for name in busy]
        time.sleep(0.02)
        for index in range(40):
            body = json.dumps({"prompt": tokens(150), "max_tokens": 1, "temperature": 0, **sample(f"gone/0/{index}/0")}).encode()
            with socket.create_connection(address) as connection:
                connection.sendall(request % (len(body), body))
        assert all(future.exception() is None for future in stayed)
    pool.make("last/0/0/0", tokens(5))  # asks are answered in order: the others have been seen by now
    for name in [*busy, "last/0/0/0"]:
        discard(store, name)
    until = time.monotonic() + 10
    while store.usage().keys and time.monotonic() < until:
        time.sleep(0.05)


def test_an_asker_that_goes_away_frees_its_slot(running, pool):
    slots = running.config.extract.batch_size

    def impatient(index: int) -> None:
        with pytest.raises(httpx.TimeoutException):
            running.ask(prompt=tokens(300, index), max_tokens=101, temperature=0, timeout=0.02)

    with ThreadPoolExecutor(4 * slots) as askers:
        list(askers.map(impatient, range(4 * slots)))
    started = time.monotonic()
    pool.complete(tokens(3), 2)
    assert time.monotonic() - started < 10
    assert "never retrieved" not in running.log.read_text()
