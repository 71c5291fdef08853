"""One role and its wrapper (`slurm.role`), on real process trees: what ends, how it ends, and that nothing is left."""

from __future__ import annotations

import signal
import sys
import time

import pytest
from processes import end_of, wait_for

# A process tree that does not go away by itself: it ignores SIGTERM, one child has a session of its own, one was forked twice.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(300)
    time.sleep(300)
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        time.sleep(300)
    os._exit(0)
time.sleep(0.2)
"""

# Ends politely: status 5 after SIGTERM, and a file that proves that its handler ran.
POLITE = """
import signal, sys, time
from pathlib import Path
def stop(*_):
    Path(sys.argv[1]).write_text("stopped")
    sys.exit(5)
signal.signal(signal.SIGTERM, stop)
print("polite is up", flush=True)
Path(sys.argv[1]).write_text("up")
time.sleep(300)
"""


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)])
def test_role_ends_with_its_commands_status(tree, script, status):
    assert end_of(tree.role("bash", "-c", script))[0] == status


def test_role_that_cannot_start_says_so_in_one_line(tree):
    assert end_of(tree.role("no-such-command")) == (127, "", "slurm.role: no-such-command: No such file or directory\n")


def test_role_leaves_no_descendant(tree):
    role = tree.role(sys.executable, "-c", STUBBORN + "print(1); os._exit(3)")
    assert end_of(role)[:2] == (3, "1\n")
    assert not tree.alive()  # at once, when the wrapper has ended


def test_ranks_end_together(tree):
    """Each knows who it is; the first that fails is the end of all, and says so."""
    script = "echo $RANK $LOCAL_RANK; [ $RANK = {} ] && exit 5; [ {} = 9 ] || sleep 300"
    tree.env |= {"WORLD_SIZE": "4", "SLURM_NODEID": "1"}
    well = tree.python("-m", "slurm.role", "--ranks", "2", "--", "sh", "-c", script.format(9, 9) + "; true")
    status, out, _ = end_of(well)
    assert status == 0 and sorted(out.splitlines()) == ["2 0", "3 1"]
    status, _, err = end_of(tree.python("-m", "slurm.role", "--ranks", "2", "--", "sh", "-c", script.format(3, 3)))
    assert status == 5 and err == "slurm.role: rank 3 ended with status 5\n"
    assert not tree.alive()


def test_role_passes_signals_on(tree, tmp_path):
    handler = """if 1:
        import signal, sys, time
        seen = open({!r}, "w", buffering=1)
        signal.signal(signal.SIGUSR1, lambda *_: seen.write("usr1\\n"))
        signal.signal(signal.SIGINT, lambda *_: (seen.write("int\\n"), sys.exit(4)))
        seen.write("up\\n")
        while True:
            time.sleep(0.05)
    """
    role = tree.role(sys.executable, "-c", handler.format(str(tmp_path / "seen")))
    for signum, seen in ((signal.SIGUSR1, "up\nusr1\n"), (signal.SIGINT, "up\nusr1\nint\n")):
        wait_for((tmp_path / "seen").exists)
        time.sleep(0.2)
        role.send_signal(signum)
        wait_for(lambda seen=seen: (tmp_path / "seen").read_text() == seen)
    assert end_of(role)[0] == 4


def test_role_gives_grace_and_no_more(tree, tmp_path):
    polite = tree.role(sys.executable, "-c", POLITE, tmp_path / "polite")
    stubborn = tree.role(sys.executable, "-c", STUBBORN + f"open({str(tmp_path / 'up')!r}, 'w'); time.sleep(300)", grace=0.5)
    wait_for((tmp_path / "polite").exists) and wait_for((tmp_path / "up").exists)
    polite.terminate(), stubborn.terminate()
    assert end_of(polite)[0] == 5
    status, _, err = end_of(stubborn, seconds=5)
    assert status == 137 and "still running 0.5 s after it was told to stop" in err


def test_command_dies_with_its_wrapper(tree):
    role = tree.role("sleep", "301")
    tree.pid("sleep 301")
    role.kill()
    role.communicate()
    tree.assert_gone(seconds=5)


def test_role_ends_when_its_parent_is_killed(tree, tmp_path):
    stubborn = STUBBORN + f"open({str(tmp_path / 'up')!r}, 'w'); time.sleep(300)"
    command = [sys.executable, "-m", "slurm.role", "--grace", "0.2", "--", sys.executable, "-c", stubborn]
    parent = tree.python("-c", f"import subprocess; subprocess.run({command!r})")
    wait_for((tmp_path / "up").exists)
    parent.kill()
    parent.communicate()
    tree.assert_gone(seconds=10)
