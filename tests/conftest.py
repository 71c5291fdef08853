from __future__ import annotations

import pytest
from processes import Tree, wait_for


@pytest.fixture
def tree():
    tree = Tree()
    yield tree
    assert wait_for(lambda: not tree.alive(), seconds=5), tree.alive()
