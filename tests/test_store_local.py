"""The local store: a budget that concurrent processes cannot exceed, objects that are whole or absent."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Store
from store import local
from store.local import LOCK, LocalStore
from store.objects import Full, Gone, Lost, Torn, open_store, run_prefix

ROOT = str(Path(__file__).parent.parent)


def child(code: str, *args: object) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": ROOT}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], stdout=subprocess.PIPE, env=environment, text=True)


def leftovers(path: Path) -> list[str]:
    return [file.name for file in path.iterdir() if file.name != LOCK]


def test_a_run_is_removed_and_no_other(tmp_path):
    store, prefix = LocalStore(tmp_path, 1000), run_prefix(tmp_path / "run")
    for name in (f"{prefix}1/0/0/0/0", f"{prefix}2/handshake/0/0/0", f"{run_prefix(tmp_path / 'other')}1/0/0/0/0"):
        store.put(name, memoryview(b"abc"))
    store.remove_run(prefix)
    assert (store.usage().keys, store.read(name)) == (1, b"abc")


def test_bytes_come_back(tmp_path):
    store = open_store(Store(path=tmp_path / "deep" / "er", bytes=100))
    store.put("run/0/1/0/0", memoryview(b"abcdef"))
    out = bytearray(6)
    assert store.read_into("run/0/1/0/0", memoryview(out)) == 6
    assert bytes(out) == store.read("run/0/1/0/0") == b"abcdef"
    assert (store.usage().keys, store.usage().bytes, store.usage().budget) == (1, 6, 100)
    store.remove(["run/0/1/0/0", "never/was"])
    assert store.usage().keys == store.usage().bytes == 0
    with pytest.raises(Lost):
        store.read("run/0/1/0/0")


def test_a_name_is_used_once_and_replace_is_whole(tmp_path):
    store = LocalStore(tmp_path, 100)
    store.put("a", memoryview(b"first"))
    with pytest.raises(ValueError, match="used once"):
        store.put("a", memoryview(b"other"))
    assert store.read("a") == b"first"
    store.replace("a", b"new")
    store.replace("b", b"made by replace")
    assert store.read("a") == b"new" and store.usage().bytes == 18


def test_full_at_once_and_room_after_removal(tmp_path):
    store = LocalStore(tmp_path, 10)
    store.put("a", memoryview(bytes(6)))
    with pytest.raises(Full, match="4 of 10 free"):
        store.put("b", memoryview(bytes(6)))
    with pytest.raises(Full, match="never fit"):
        store.put("b", memoryview(bytes(11)))
    with pytest.raises(Full):
        store.replace("c", bytes(5))
    assert store.usage().bytes == 6
    store.remove(["a"])
    store.put("b", memoryview(bytes(10)))


@pytest.mark.parametrize("name", ["", ".", "..", "x" * 256])
def test_names_that_are_no_objects(tmp_path, name):
    with pytest.raises(ValueError, match="object's name"):
        LocalStore(tmp_path, 10).put(name, memoryview(b"1"))


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=20).filter(lambda name: name not in (".", "..")), st.binary(min_size=1), max_size=8))
def test_any_name_stays_inside_and_apart(tmp_path_factory, objects):
    path = tmp_path_factory.mktemp("store")
    store = LocalStore(path / "inside", 10_000)
    for name, data in objects.items():
        store.put(name, memoryview(data))
    assert {name: store.read(name) for name in objects} == objects
    assert [entry.name for entry in path.iterdir()] == ["inside"]
    store.remove(objects)
    assert leftovers(path / "inside") == []  # no empty folders either


def test_no_name_climbs_out(tmp_path):
    store = LocalStore(tmp_path / "store", 100)
    store.put("../../escape", memoryview(b"1"))
    assert leftovers(tmp_path) == ["store"]


def test_a_cut_object_is_torn(tmp_path):
    store = LocalStore(tmp_path, 100)
    store.put("a", memoryview(bytes(8)))
    os.truncate(tmp_path / "a", 5)
    with pytest.raises(Torn, match="5 bytes") as caught:
        store.read_into("a", memoryview(bytearray(8)))
    assert caught.value.cause == "size"


def test_gone_when_the_folder_is(tmp_path):
    store = LocalStore(tmp_path / "store", 100)
    store.put("a", memoryview(b"1"))
    for file in (tmp_path / "store").iterdir():
        file.unlink()
    (tmp_path / "store").rmdir()
    for call in (lambda: store.put("b", memoryview(b"1")), lambda: store.read("a"), store.usage):
        with pytest.raises(Gone):
            call()
    with pytest.raises(Gone, match="Not a directory"):
        LocalStore(Path("/dev/null/store"), 100)


def test_gone_when_the_lock_is_held_by_a_stopped_process(tmp_path, monkeypatch):
    store = LocalStore(tmp_path, 100)
    holder = child(
        "import fcntl, sys, time; f = open(sys.argv[1], 'ab'); fcntl.flock(f, 2); print(1, flush=True); time.sleep(60)", tmp_path / LOCK
    )
    try:
        holder.stdout.readline()
        monkeypatch.setattr(local, "LOCK_S", 0.2)
        with pytest.raises(Gone, match="lock"):
            store.put("a", memoryview(b"1"))
    finally:
        holder.kill()
        holder.wait()
    store.put("a", memoryview(b"1"))


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    store = LocalStore(tmp_path, 100)

    def disk_is_full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", disk_is_full)
    with pytest.raises(Full, match="without room"):
        store.put("a", memoryview(bytes(8)))
    assert leftovers(tmp_path) == []


PUTTER = """
import sys, random
from store.local import LocalStore
from store.objects import Full
path, seed = sys.argv[1], int(sys.argv[2])
store, chance, mine, full = LocalStore(path, 100_000), random.Random(seed), [], 0
print("ready", flush=True)
for n in range(150):
    size = chance.randrange(1, 30_000)
    try:
        store.put(f"{seed}/{n}", memoryview(bytes([seed]) * size))
        mine.append((f"{seed}/{n}", size))
    except Full:
        full += 1
        if mine:
            name, size = mine.pop(chance.randrange(len(mine)))
            assert store.read(name) == bytes([seed]) * size
            store.remove([name])
store.remove(name for name, _ in mine)
print(full)
"""


@pytest.mark.integration
def test_concurrent_putters_never_exceed_the_budget(tmp_path):
    store = LocalStore(tmp_path, 100_000)
    putters = [child(PUTTER, tmp_path, seed) for seed in (1, 2, 3)]
    for putter in putters:
        putter.stdout.readline()
    most = 0
    while any(putter.poll() is None for putter in putters):
        most = max(most, store.usage().bytes)
    assert [putter.returncode for putter in putters] == [0, 0, 0]
    assert 60_000 < most <= 100_000
    assert all(int(putter.stdout.read()) > 5 for putter in putters), "no putter met a full store: nothing was tested"
    assert store.usage().bytes == 0 and leftovers(tmp_path) == []


def test_threads_share_the_budget_too(tmp_path):
    store, put = LocalStore(tmp_path, 1000), []

    def fill(thread: int) -> None:
        for n in range(20):
            try:
                store.put(f"{thread}/{n}", memoryview(bytes(90)))
                put.append(90)
            except Full:
                pass

    threads = [threading.Thread(target=fill, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(put) == store.usage().bytes == 990


STUCK = """
import sys, time
from store.local import LocalStore
class Slow:
    nbytes = 6000
    def __bool__(self):
        print("putting", flush=True)
        time.sleep(60)
LocalStore(sys.argv[1], 10_000)._folder.write("victim", memoryview(bytes(1000)), Slow())
"""


def test_sigkill_in_put_leaves_nothing_and_the_space_returns(tmp_path):
    store = LocalStore(tmp_path, 10_000)
    victim = child(STUCK, tmp_path)
    assert victim.stdout.readline() == "putting\n"
    usage = store.usage()
    assert (usage.keys, usage.bytes) == (0, 7000), "an unfinished put is invisible and its room is taken"
    with pytest.raises(Full):
        store.put("other", memoryview(bytes(5000)))
    victim.kill()
    victim.wait()
    with pytest.raises(Lost):
        store.read("victim")
    store.put("other", memoryview(bytes(10_000)))
    assert leftovers(tmp_path) == ["other"]


ENDLESS = """
import sys
from store.local import LocalStore
store, number = LocalStore(sys.argv[1], 40_000_000), 0
print("ready", flush=True)
while True:
    store.put(f"{sys.argv[2]}/{number}", memoryview(bytes([number % 251]) * 10_000_000))
    if number >= 2:
        store.remove([f"{sys.argv[2]}/{number - 2}"])
    number += 1
"""


@pytest.mark.integration
def test_sigkill_at_any_moment_leaves_whole_objects_only(tmp_path):
    chance, store = random.Random(0), LocalStore(tmp_path, 40_000_000)
    for life in range(6):
        victim = child(ENDLESS, tmp_path, life)
        victim.stdout.readline()
        time.sleep(chance.uniform(0, 0.05))
        victim.kill()
        victim.wait()
        usage = store.usage()
        assert usage.bytes == usage.keys * 10_000_000 and usage.keys <= 3
        for file in leftovers(tmp_path):
            data = (tmp_path / file).read_bytes()
            assert len(set(data)) == 1
            store.remove([file.replace("%2F", "/")])
        assert store.usage().bytes == 0
