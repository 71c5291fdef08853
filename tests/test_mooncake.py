"""The store on a real Mooncake: what the interface promises, and what is left of it when processes die, hang and come back."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from mooncake_lab import CONTRACT, DEADLINE_S, ORPHAN_S, RELEASE_S, SLACK_S, Lab, empty, made, within
from processes import Tree, stop, wait_for

from store.master_http import REGISTRATION
from store.objects import Full, Gone, Lost, Torn
from store.sample import MAX_PARTS, bytes_of, discard, fetch

pytestmark = pytest.mark.integration

DEAD_MASTER_S = 5  # Mooncake tries to connect for 4.3 s


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    tree = Tree()
    lab = Lab(tmp_path_factory.mktemp("mooncake"), tree)
    lab.start_master()
    yield lab
    lab.master.terminate()
    assert lab.master.wait(60) == 0, lab.log.read_text()
    assert not (lab.config.store.path / REGISTRATION).exists()
    tree.assert_gone()


@pytest.fixture(scope="module")
def store(lab):
    """A client that owns no memory, as in a trainer."""
    client = lab.client()
    yield client
    client.close()


@pytest.fixture
def producer(lab):
    producer = lab.producer()
    yield producer
    producer.kill()


@pytest.fixture(scope="module")
def long_lived(lab):
    """A producer that no test harms, so that there is memory in the store."""
    producer = lab.producer()
    yield producer
    producer.process.stdin.close()
    assert producer.process.wait(60) == 0


def block(size: int, fill: int = 0) -> memoryview:
    return memoryview(bytearray([fill]) * size)


def test_bytes_come_back(store, long_lived):
    store.put("run/0/1/0/0", block(70_000, 7))
    out = block(70_000)
    assert store.read_into("run/0/1/0/0", out) == 70_000 and out == block(70_000, 7)
    assert store.read("run/0/1/0/0") == bytes(out)
    with pytest.raises(ValueError, match="used once"):
        store.put("run/0/1/0/0", block(10))
    store.replace("run/0/1/0/manifest", b"first")
    store.replace("run/0/1/0/manifest", b"second, longer")
    assert store.read("run/0/1/0/manifest") == b"second, longer"
    assert store.usage().keys == 2 and store.usage().bytes >= 70_014
    for size in (69_999, 70_001):
        with pytest.raises(Torn) as torn:
            store.read_into("run/0/1/0/0", block(size))
        assert torn.value.cause == "size"
    store.remove(["run/0/1/0/manifest", "never/was", "run/0/1/0/0"])
    assert store.usage().keys == 0
    assert store.usage().bytes <= len("first")  # which somebody may still be reading, for `release_s`
    for missing in (lambda: store.read("run/0/1/0/0"), lambda: store.read_into("run/0/1/0/0", out)):
        with pytest.raises(Lost):
            missing()
    store.replace("big", bytes(3 << 20))  # larger than what small objects are read into at first
    assert store.read("big") == bytes(3 << 20)
    store.put("r-1/a", block(9))
    store.put("r-2/a", block(9))
    store.remove_run("r-1")
    assert store.usage().keys == 2
    store.remove(["big", "r-2/a"])


def test_full_at_once_and_nothing_acknowledged_is_lost(lab, store, long_lived):
    put = []
    with pytest.raises(Full):
        for count in range(100):
            store.put(f"full/{count}", block(4 << 20, count))
            put.append(count)
    assert len(put) * (4 << 20) >= lab.config.store.bytes
    assert isinstance(within(0.5, store.put, "full/more", block(4 << 20)), Full)
    out = block(4 << 20)
    for count in put:
        store.read_into(f"full/{count}", out)
        assert out[0] == out[-1] == count
    store.remove([f"full/{count}" for count in put[:2]])
    store.put("full/more", block(4 << 20))
    store.remove_run("full")
    assert store.usage().keys == 0


@pytest.mark.parametrize("codec", ["raw", "fp8"])
@pytest.mark.parametrize("registered", [True, False])
def test_a_sample_lands_in_the_batch(store, long_lived, codec, registered):
    assert long_lived.do("ship", "s/0/1/0", 700, codec) == "None"
    batch = torch.full((1000, 4, 64), 9.0)
    if registered:
        store.register(bytes_of(batch))
    fetch(store, "s/0/1/0", CONTRACT.model_copy(update={"codec": codec}), list(range(700)), batch[50:750])
    error = (batch[50:750] - made(700)).norm() / made(700).norm()
    assert error == 0 if codec == "raw" else 0 < error < 0.03
    assert (batch[:50] == 9).all() and (batch[750:] == 9).all()
    assert torch.equal(batch[50:750, -1], made(700)[:, -1])
    discard(store, "s/0/1/0")
    assert store.usage().keys == 0
    if registered:
        store._client.unregister_buffer(batch.data_ptr())  # this client lives longer than the batch
        store._registered.pop()


def test_overwritten_and_cut_objects_are_refused(store, long_lived):
    for new, cause in ((block(100 * 4 * 64 * 4, 1), "checksum"), (block(999), "size")):
        long_lived.do("ship", "o/0/1/0", 300, "raw")
        store.remove(["o/0/1/0/1"])
        store.put("o/0/1/0/1", new)
        with pytest.raises(Torn) as torn:
            fetch(store, "o/0/1/0", CONTRACT, list(range(300)), torch.empty(300, 4, 64))
        assert torn.value.cause == cause
        store.remove(["o/0/1/0/1"])
        with pytest.raises(Lost):
            fetch(store, "o/0/1/0", CONTRACT, list(range(300)), torch.empty(300, 4, 64))
        discard(store, "o/0/1/0")


def test_overwritten_while_it_is_read(store, lab, long_lived):
    """Mooncake hands over mixed bytes with a good return code; the checksum is what tells."""
    size, seen = 24 << 20, set()
    for attempt in range(6):
        long_lived.do("put", f"torn/{attempt}", size, 1)
        out = block(size)
        reader = threading.Thread(target=within, args=(5, store.read_into, f"torn/{attempt}", out))
        reader.start()
        time.sleep(0.005 * attempt)
        store.remove([f"torn/{attempt}"])
        long_lived.do("put", f"torn/{attempt}/again", size, 2)
        reader.join()
        seen |= {*out[:: 1 << 16]}
        store.remove([f"torn/{attempt}/again"])
    assert seen <= {0, 1, 2}


def test_nothing_is_called_after_close_or_in_a_fork(lab, long_lived):
    client = lab.client()
    client.put("c", block(100))
    child = os.fork()
    if child == 0:
        try:
            client.read("c")
        except RuntimeError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert client.read("c") == bytes(100)
    client.remove(["c"])
    client.close()
    client.close()
    for call in (
        lambda: client.read("c"),
        lambda: client.put("c", block(1)),
        lambda: client.remove(["c"]),
        lambda: client.replace("c", b"1"),
    ):
        with pytest.raises(Gone, match="closed"):
            call()


def test_close_waits_for_calls_that_run(lab, long_lived):
    client, results = lab.client(), []
    client.put("w", block(16 << 20, 3))

    def read():
        while not isinstance(results[-1] if results else None, Gone):
            results.append(within(5, client.read_into, "w", block(16 << 20)))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    client.close()
    for thread in threads:
        thread.join()
    assert {type(result) for result in results} == {int, Gone}
    other = lab.client()
    other.remove(["w"])
    other.close()


def test_threads_put_read_and_remove_at_once(lab, long_lived):
    client, size = lab.client(), 300_000

    def work(thread: int) -> None:
        out = block(size)
        for count in range(25):
            name = f"threads/{thread}/{count}"
            client.put(name, block(size, 25 * thread + count))
            assert client.read_into(name, out) == size and out[0] == out[-1] == 25 * thread + count
            client.remove([name])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    client.close()


def test_clients_that_start_together(lab):
    with ThreadPoolExecutor(6) as threads:
        producers = list(threads.map(lambda _: lab.producer(), range(6)))
    assert [producer.do("put", f"together/{producer.pid}", 1000, 1) for producer in producers] == ["None"] * 6
    for producer in producers:
        producer.kill()


def test_killed_producer(store, producer, long_lived):
    producer.do("ship", "k/0/1/0", 300, "raw")
    producer.kill()
    error = within(1, fetch, store, "k/0/1/0", CONTRACT, list(range(300)), torch.empty(300, 4, 64))
    assert isinstance(error, Lost), error
    discard(store, "k/0/1/0")
    assert long_lived.do("ship", "k/0/1/1", 300, "raw") == "None"  # another extractor makes it
    fetch(store, "k/0/1/1", CONTRACT, list(range(300)), torch.empty(300, 4, 64))
    discard(store, "k/0/1/1")
    wait_for(lambda: empty(store.usage()), RELEASE_S + 5 + SLACK_S)


def test_stopped_producer_and_no_byte_afterwards(store, producer):
    size, out = 32 << 20, block(32 << 20)
    store.register(out)
    producer.do("put", "stop/1", size, 1)
    stop(producer.pid)
    try:
        error = within(DEADLINE_S + 0.5, store.read_into, "stop/1", out)
        assert isinstance(error, Lost), error
        out[:] = block(size, 9)
    finally:
        os.kill(producer.pid, signal.SIGCONT)
    time.sleep(0.5)
    assert out == block(size, 9), "bytes arrived after the read had failed"
    assert within(10, store.read_into, "stop/1", out) == size and out == block(size, 1)
    store.remove(["stop/1"])
    store._client.unregister_buffer(store._registered.pop().start)


def test_producer_killed_in_the_middle_of_a_put(lab, store, long_lived):
    """The put of a process without memory of its own goes into another's, where it would stay."""
    moments = random.Random(0).sample(range(1, 60), 3)
    for moment in moments:
        producer = lab.producer(share=0)
        producer.send("puts", f"dead{moment}", 12 << 20)
        time.sleep(moment / 1000)
        producer.kill()
    out = block(12 << 20)
    for moment in moments:
        for count in range(5):
            assert isinstance(result := within(1, store.read_into, f"dead{moment}/{count}", out), int | Lost), result
    store.remove_run("dead")
    wait_for(lambda: empty(store.usage()), RELEASE_S + 5 + SLACK_S)
    for count in range(4):
        long_lived.do("put", f"again/{count}", 12 << 20, 1)
        assert store.read_into(f"again/{count}", out) == 12 << 20
    store.remove_run("again")


def test_orphans_are_swept(store, long_lived):
    long_lived.do("ship", "orphan/0/1/0", 300, "raw")
    assert long_lived.do("put", "orphan/half/0", 1000, 1) == "None"
    assert store.usage().keys == 5
    wait_for(lambda: empty(store.usage()), ORPHAN_S + 5 + SLACK_S)


def test_stopped_master(lab, store, long_lived):
    assert long_lived.do("put", "m", 1000, 1) == "None"
    for call, *arguments in ((store.put, "n", block(10)), (store.remove, ["n"])):
        stop(lab.master_pid())
        try:
            assert isinstance(within(2 * DEADLINE_S, call, *arguments), Gone)
        finally:
            os.kill(lab.master_pid(), signal.SIGCONT)
        wait_for(lambda: not isinstance(within(5, store.put, f"m/{random.random()}", block(10)), Gone))
    assert lab.master.poll() is None, "so short a stop is no reason to end it"
    store.remove_run("m")
    wait_for(lambda: store.usage().bytes == 0, RELEASE_S + ORPHAN_S + SLACK_S)  # "n" may have been stored all the same


def test_killed_master_comes_back_at_its_place(lab, store, long_lived):
    store.put("before", block(1000))
    os.kill(lab.master_pid(), signal.SIGKILL)
    assert lab.master.wait(30) == 1 and "mooncake_master ended with status -9" in lab.log.read_text()
    for call, *arguments in ((store.read, "before"), (store.put, "n", block(10))):
        assert isinstance(within(DEAD_MASTER_S, call, *arguments), Gone)
    lab.start_master()
    wait_for(lambda: within(DEAD_MASTER_S, store.put, f"after/{random.random()}", block(10)) is None, 20)
    with pytest.raises(Lost):
        store.read("before")
    assert wait_for(lambda: store.usage().budget > lab.config.store.bytes, 10)  # the producer has mounted its memory again
    assert long_lived.do("ship", "a/0/1/0", 300, "raw") == "None"
    fetch(store, "a/0/1/0", CONTRACT, list(range(300)), torch.empty(300, 4, 64))
    store.remove_run("a")
    assert empty(store.usage())


def test_two_masters_in_one_folder(lab, long_lived):
    second = lab.tree.python("-m", "store.master", lab.recipe)
    _, err = second.communicate(timeout=120)
    assert second.returncode == 1 and "is still running" in err
    assert long_lived.do("put", "still/1", 1000, 1) == "None"
    client = lab.client()
    client.remove(["still/1"])
    client.close()


def test_parts_of_a_sample_are_found_without_a_manifest(store, long_lived):
    for part in (0, MAX_PARTS - 1):
        store.put(f"p/0/1/0/{part}", block(10))
    discard(store, "p/0/1/0")
    assert empty(store.usage())
