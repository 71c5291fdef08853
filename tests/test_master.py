"""`store.master` by itself: how it ends, and what it refuses."""

from __future__ import annotations

import time

import pytest
from mooncake_lab import DEADLINE_S, SLACK_S, Lab
from processes import Tree, stop

from store import master_http
from store.master_http import REGISTRATION
from store.objects import Gone, open_store

pytestmark = pytest.mark.integration


def test_killed_wrapper_takes_the_master_with_it(tmp_path, monkeypatch):
    tree = Tree()
    lab = Lab(tmp_path, tree)
    lab.start_master()
    lab.master.kill()
    tree.assert_gone()
    began = time.monotonic()
    with pytest.raises(Gone, match="does not answer"):  # a stale registration
        open_store(lab.config.store)
    (lab.config.store.path / REGISTRATION).unlink()
    monkeypatch.setattr(master_http, "START_S", 0.1)
    with pytest.raises(Gone, match="no master has registered in"):
        open_store(lab.config.store)
    assert time.monotonic() - began < DEADLINE_S + SLACK_S


def test_a_master_that_hangs_is_ended(tmp_path):
    tree = Tree()
    lab = Lab(tmp_path, tree)
    lab.start_master()
    stop(lab.master_pid())
    assert lab.master.wait(4 * DEADLINE_S + 60) == 1 and "mooncake_master has not answered for" in lab.log.read_text()
    tree.assert_gone()


@pytest.mark.parametrize(
    ("override", "status", "why"),
    [("store.kind=local", 2, "store.kind is local"), ("store.mooncake.host=192.0.2.1", 1, "store.mooncake.host = '192.0.2.1': no port")],
)
def test_masters_that_cannot_start(tmp_path, override, status, why):
    tree = Tree()
    process = tree.python("-m", "store.master", Lab(tmp_path, tree).recipe, override)
    _, err = process.communicate(timeout=120)
    assert process.returncode == status and why in err and "Traceback" not in err
