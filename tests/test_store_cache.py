"""The durable cache: content-addressed, bounded, oldest first out, valid after a SIGKILL at any moment."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from store.cache import HEADER, DurableCache
from store.contract import StateContract
from store.objects import Full, Torn

ROOT = str(Path(__file__).parent.parent)
CONTRACT = StateContract(verifier="v1", taps=(1, 3), last="pre_norm", dtype="float32", engine={})
ENTRY = 5 * 3 * 4 * 4 + HEADER.size  # bytes


def states(seed: int) -> torch.Tensor:
    return torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int) -> list[int]:
    return [seed, 1, 2, 3, 4]


def held(cache: DurableCache, seeds) -> list[int]:
    """Those of `seeds` that the cache has; what it has is right."""
    out, found = torch.empty(5, 3, 4), []
    for seed in seeds:
        if cache.get_into(CONTRACT, tokens(seed), out):
            assert torch.equal(out, states(seed))
            found.append(seed)
    return found


def test_content_is_the_key(tmp_path):
    cache, out = DurableCache(tmp_path / "made" / "for you", 10 * ENTRY), torch.empty(9, 3, 4)
    assert not cache.get_into(CONTRACT, tokens(1), out[:5])
    cache.put(CONTRACT, tokens(1), states(1))
    cache.put(CONTRACT, tokens(1), states(1))
    assert cache.usage().keys == 1
    assert DurableCache(tmp_path / "made" / "for you", 10 * ENTRY).get_into(CONTRACT, tokens(1), out[3:8])
    assert torch.equal(out[3:8], states(1))
    assert not cache.get_into(CONTRACT, tokens(2), out[:5])
    assert not cache.get_into(CONTRACT.model_copy(update={"taps": (1, 2)}), tokens(1), out[:5])
    with pytest.raises(ValueError, match="not contiguous"):
        cache.get_into(CONTRACT, tokens(1), torch.empty(5, 4, 3).transpose(1, 2))


def test_oldest_first_out(tmp_path):
    cache = DurableCache(tmp_path, 3 * ENTRY + 5)
    for seed in range(3):
        cache.put(CONTRACT, tokens(seed), states(seed))
        time.sleep(0.005)
    assert held(cache, range(9)) == [0, 1, 2]
    cache.put(CONTRACT, tokens(3), states(3))
    assert held(cache, range(9)) == [1, 2, 3]  # having been read last saved nobody
    for seed in range(4, 6):
        time.sleep(0.005)
        cache.put(CONTRACT, tokens(seed), states(seed))
    assert held(cache, range(9)) == [3, 4, 5]
    assert cache.usage().bytes == 3 * ENTRY


def test_what_can_never_fit_evicts_nothing(tmp_path):
    cache = DurableCache(tmp_path, ENTRY)
    cache.put(CONTRACT, tokens(0), states(0))
    with pytest.raises(Full, match="never fit"):
        cache.put(CONTRACT, list(range(10)), torch.zeros(10, 3, 4))
    assert held(cache, [0]) == [0]


def test_files_of_others_are_counted_and_never_removed(tmp_path):
    (tmp_path / "thesis.tex").write_bytes(bytes(ENTRY))
    cache = DurableCache(tmp_path, 2 * ENTRY)
    for seed in range(3):
        cache.put(CONTRACT, tokens(seed), states(seed))
    assert (tmp_path / "thesis.tex").exists() and held(cache, range(3)) == [2]


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty", "header"])
def test_corrupt_is_a_miss_and_is_removed(tmp_path, damage):
    cache = DurableCache(tmp_path, 3 * ENTRY)
    cache.put(CONTRACT, tokens(0), states(0))
    (file,) = tmp_path.glob("*.states")
    data = bytearray(file.read_bytes())
    if damage in ("flip", "header"):
        data[100 if damage == "flip" else 12] ^= 4
    file.write_bytes({"cut": data[:-3], "longer": data + b"x", "empty": b""}.get(damage, data))
    assert held(cache, [0]) == [] and not file.exists()
    cache.put(CONTRACT, tokens(0), states(0))
    assert held(cache, [0]) == [0]


def test_what_is_not_finite_is_not_kept(tmp_path):
    cache, bad = DurableCache(tmp_path, 3 * ENTRY), states(0)
    bad[2, 1, 0] = float("nan")
    with pytest.raises(Torn):
        cache.put(CONTRACT, tokens(0), bad)
    assert held(cache, [0]) == []


WRITER = """
import sys
import torch
from store.cache import DurableCache
from test_store_cache import CONTRACT, ENTRY, states, tokens
torch.set_num_threads(1)
cache, seed = DurableCache(sys.argv[1], 20 * ENTRY), int(sys.argv[2])
print("ready", flush=True)
while True:
    cache.put(CONTRACT, tokens(seed % 60), states(seed % 60))
    seed += 7
"""


@pytest.mark.integration
def test_several_writers_and_sigkill_at_any_moment(tmp_path):
    chance, cache = random.Random(0), DurableCache(tmp_path, 20 * ENTRY)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, str(n)], stdout=subprocess.PIPE, env=environment) for n in (0, 1, 2)
    ]
    for writer in writers:
        writer.stdout.readline()
    for writer in writers:
        for _ in range(3):
            time.sleep(chance.uniform(0, 0.1))
            held(cache, range(60))  # while the others write
            assert cache.usage().bytes <= 20 * ENTRY
        writer.kill()
        writer.wait()
    whole = cache.usage().keys  # a writer that is killed after it made room leaves room, at most one entry each
    assert 17 <= whole <= 20 and len(held(cache, range(60))) == whole, "an entry was not whole"
    for seed in range(60, 63):
        cache.put(CONTRACT, tokens(seed), states(seed))
    assert cache.usage().keys == 20 and cache.usage().bytes == 20 * ENTRY, "room was lost"
