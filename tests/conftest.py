"""What many tests share: processes that must not outlive a test, tiny random verifiers, a running extractor."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest
from processes import Tree
from tiny import VLLM, save_tiny_verifier, start_extractor, stop_extractor, write_recipe


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("ends_server") is not None)  # stable: nothing else moves


@pytest.fixture
def tree():
    tree = Tree()
    yield tree
    tree.assert_gone()


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory):
    """tiny_verifier(family="llama" | "qwen3", poisoned=False) -> its folder, made once."""
    return cache(lambda family="llama", poisoned=False: save_tiny_verifier(tmp_path_factory.mktemp(family) / "verifier", family, poisoned))


@pytest.fixture(scope="session")
def extractor(tiny_verifier, tmp_path_factory):
    """A running extractor of the tiny Llama with the poisoned token, for tests that leave it as it was."""
    recipe = write_recipe(tmp_path_factory.mktemp("extractor"), tiny_verifier("llama", poisoned=True))
    running = start_extractor(recipe)
    yield running
    assert stop_extractor(running) == 0, running.log.read_text()


@pytest.fixture(scope="session")
def vllm_extractor(tiny_verifier, tmp_path_factory):
    """The same, run by vLLM, which takes a minute to start: one for all tests, and the one marked `ends_server` comes last."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed here")
    recipe = write_recipe(tmp_path_factory.mktemp("vllm"), tiny_verifier("llama", poisoned=True), {"extract": VLLM})
    running = start_extractor(recipe)
    yield running
    assert stop_extractor(running) == 0, running.log.read_text()
