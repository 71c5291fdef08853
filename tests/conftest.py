"""What many tests share: processes that must not outlive a test, tiny random verifiers, a running extractor."""

from __future__ import annotations

from functools import cache

import pytest
from processes import Tree
from tiny import save_tiny_verifier, start_extractor, stop_extractor, write_recipe


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
