"""The launcher of roles, on real process trees: what ends, how it ends, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from processes import end_of, wait_for
from test_role import POLITE, STUBBORN

from configs.command import PlainError
from slurm.launch import exclusive
from slurm.roles import extractor_ready

# A launcher whose table of roles comes from the command line: [name, command, file that says "ready" or null, echo], then how
# often it is started again, a file without which it counts as hanging, and how many of its kind are enough.
LAUNCHER = """
import json, os, sys
from pathlib import Path
from configs.schema import Launch
from slurm import processes
processes.LOOK_S = 0.1
def exists(file):
    return lambda: None if Path(file).exists() else f"{file} is missing"
def role(name, command, file, echo, restarts=0, alive=None, enough=None):
    forget = lambda: Path(file).unlink(missing_ok=True) if file else None
    ready, alive = (exists(f) if f else None for f in (file, alive))
    return processes.Role(name, command, dict(os.environ), ready, alive, forget, restarts, enough, echo=echo)
rows, logs, ready_s, grace_s, checkpoint_s = json.loads(sys.argv[1])
launch = Launch(ready_s=ready_s, grace_s=grace_s, stuck_s=0.5, checkpoint_s=checkpoint_s)
outcome = processes.run_roles([role(*row) for row in rows], Path(logs), launch)
Path(logs, "state").write_text(outcome.state)
sys.exit(outcome.status)
"""


# ---- all roles


def launcher(tree, tmp_path, *rows: list, ready_s=20.0, grace_s=10.0, checkpoint_s=60.0) -> subprocess.Popen:
    return tree.python("-c", LAUNCHER, json.dumps([rows, str(tmp_path / "logs"), ready_s, grace_s, checkpoint_s]))


def service(tmp_path, prologue: str = "") -> list:
    """A row for a service that is ready when it says so and ends politely."""
    return ["server", [sys.executable, "-c", prologue + POLITE, str(tmp_path / "server")], str(tmp_path / "server"), False]


def job(script: str, restarts: int = 0) -> list:
    return ["job", ["bash", "-c", script], None, True, restarts]


def test_a_job_is_started_again(tree, tmp_path):
    script = f"echo once more >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) = 3 ] || exit 9"
    status, _, err = end_of(launcher(tree, tmp_path, service(tmp_path), job(script, restarts=2)))
    assert status == 0 and "job ended with status 9; started again (2 of 2); the end of" in err
    (tmp_path / "tries").unlink()
    status, _, err = end_of(launcher(tree, tmp_path, service(tmp_path), job(script, restarts=1)))
    assert status == 9 and "job ended with status 9; stopping all roles" in err


@pytest.mark.parametrize("victim", ["command", "wrapper"])
def test_a_service_is_started_again_and_nothing_of_the_old_one_is_left(tree, tmp_path, victim):
    up = [*service(tmp_path, prologue=STUBBORN), 1]
    process = launcher(tree, tmp_path, up, job(f"while [ ! -e {tmp_path}/enough ]; do sleep 0.1; done; cat {tmp_path}/server; :"))
    wait_for((tmp_path / "logs" / "job.log").exists)
    first = tree.pid(str(tmp_path / "server"), wrapper=victim == "wrapper")
    old = {pid for pid, line in tree.alive().items() if line.endswith(str(tmp_path / "server"))}
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: (tmp_path / "logs" / "server.log").read_text().count("\npolite is up\n") == 2 and (tmp_path / "server").exists())
    assert not old & tree.alive().keys()
    (tmp_path / "enough").touch()
    status, out, err = end_of(process)
    assert (status, out) == (0, "up") and "server was killed by SIGKILL; started again (1 of 1)" in err
    assert err.count("server is ready after") == 2


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_service_that_hangs_counts_as_dead(tree, tmp_path, restarts):
    healthy = tmp_path / "healthy"
    healthy.touch()
    process = launcher(
        tree, tmp_path, [*service(tmp_path), restarts, str(healthy)], job(f"while [ ! -e {tmp_path}/enough ]; do sleep 0.1; done")
    )
    wait_for((tmp_path / "logs" / "job.log").exists)
    os.kill(tree.pid(str(tmp_path / "server")), signal.SIGSTOP)  # SIGTERM would not end it
    healthy.unlink()
    if restarts:
        wait_for(lambda: "server" in (tmp_path / "logs" / "server.log").read_text() and not (tmp_path / "server").exists())
        healthy.touch()
        wait_for((tmp_path / "server").exists)
        (tmp_path / "enough").touch()
    status, _, err = end_of(process)
    assert f"server has not answered for 0.5 s ({healthy} is missing)" in err
    assert status == (0 if restarts else 1)


def test_a_launch_goes_on_with_enough_services(tree, tmp_path):
    up = [[f"server-{n}", [sys.executable, "-c", POLITE, f"{tmp_path}/{n}"], f"{tmp_path}/{n}", False, 0, None, 1] for n in (0, 1)]
    process = launcher(tree, tmp_path, *up, job("echo job; sleep 300"))
    assert process.stdout.readline() == "job\n"
    os.kill(tree.pid(f"{tmp_path}/0"), signal.SIGKILL)
    wait_for(lambda: not (tmp_path / "0").exists())  # it is forgotten
    time.sleep(1)
    assert process.poll() is None
    os.kill(tree.pid(f"{tmp_path}/1"), signal.SIGKILL)
    status, _, err = end_of(process)
    assert status == 137 and "server-0 was killed by SIGKILL; going on with the other 1" in err and "server-1 was killed" in err


def test_out_of_time(tree, tmp_path):
    """SIGUSR1 reaches the one below the job that has a handler, and not the one that would die of it."""
    rank = """if 1:
        import signal, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print("checkpoint")))
        print("job", flush=True)
        time.sleep(300)
    """
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    process = launcher(tree, tmp_path, service(tmp_path), ["job", [sys.executable, "-c", parent], None, True])
    assert process.stdout.readline() == "job\n"
    process.send_signal(signal.SIGUSR1)
    status, out, err = end_of(process)
    assert (status, out) == (0, "checkpoint\n") and (tmp_path / "logs" / "state").read_text() == "out_of_time", err
    assert (tmp_path / "server").read_text() == "stopped"


@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "deaf"])
def test_out_of_time_without_a_checkpoint(tree, tmp_path, waiting):
    row = service(tmp_path)
    row[2] = str(tmp_path / "never") if waiting else row[2]
    process = launcher(tree, tmp_path, row, job("echo job; sleep 300"), checkpoint_s=1.0)
    wait_for((tmp_path / "server").exists) if waiting else process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    status, _, err = end_of(process)
    assert status == 138 and (tmp_path / "logs" / "state").read_text() == "out_of_time", err


def test_good_launch(tree, tmp_path):
    status, out, err = end_of(
        launcher(tree, tmp_path, service(tmp_path), job(f"cat {tmp_path}/server; echo; echo step 1; sleep 0.3; echo step 2"))
    )
    assert (status, out) == (0, "up\nstep 1\nstep 2\n"), err  # the job began when the server was up, and its output came through
    assert (tmp_path / "server").read_text() == "stopped"  # by SIGTERM, with time to end
    assert "server is ready" in err and not tree.alive()


def test_first_dead_job_ends_the_launch_with_its_log(tree, tmp_path):
    for _ in range(2):  # the second launch must not show the first one's log
        status, _, err = end_of(
            launcher(tree, tmp_path, service(tmp_path), job("echo earlier; for i in {1..90}; do echo line $i; done; exit 9"))
        )
        last = err[err.rindex("launch: job") :].splitlines()
        assert status == 9 and last[0] == f"launch: job ended with status 9; the end of {tmp_path}/logs/job.log:"
        assert last[1:] == [f"  line {i}" for i in range(11, 91)]
        assert (tmp_path / "server").read_text() == "stopped" and not tree.alive()
    assert (tmp_path / "logs/job.log").read_text().count("earlier\n") == 2  # evidence of the first is kept


@pytest.mark.parametrize("wrapper", [False, True], ids=["command", "wrapper"])
def test_dead_service_ends_the_launch(tree, tmp_path, wrapper):
    """SIGKILL of the server: its own children go, the job is told to stop, and the server is named although the job ends too."""
    process = launcher(
        tree, tmp_path, service(tmp_path, STUBBORN), job("trap 'echo job stops; exit 0' TERM; echo job; while :; do sleep 0.1; done")
    )
    assert process.stdout.readline() == "job\n"
    os.kill(tree.pid(f"{tmp_path}/server", wrapper), signal.SIGKILL)
    status, out, err = end_of(process, seconds=8)
    assert status == 137 and out == "job stops\n" and not tree.alive()
    assert err.rstrip().endswith(f"launch: server was killed by SIGKILL; the end of {tmp_path}/logs/server.log:\n  polite is up")


def test_service_that_ends_well_is_a_failure_too(tree, tmp_path):
    row = ["server", ["bash", "-c", f"touch {tmp_path}/server; sleep 1"], str(tmp_path / "server"), False]
    status, _, err = end_of(launcher(tree, tmp_path, row, job("sleep 300")))
    assert status == 1 and "launch: server ended with status 0" in err


def test_service_that_dies_before_it_is_ready(tree, tmp_path):
    row = ["server", ["bash", "-c", "echo no such model; exit 17"], str(tmp_path / "never"), False]
    status, out, err = end_of(launcher(tree, tmp_path, row, job("echo started"), ready_s=300), seconds=8)
    assert (status, out) == (17, "") and "server ended with status 17" in err and err.endswith("\n  no such model\n")


def test_service_that_is_never_ready(tree, tmp_path):
    row = ["server", [sys.executable, "-c", STUBBORN + "time.sleep(300)"], str(tmp_path / "never"), False]
    status, out, err = end_of(launcher(tree, tmp_path, row, job("echo started"), ready_s=0.6, grace_s=0.3))
    assert (status, out) == (1, "") and f"server was not ready within 0.6 s ({tmp_path}/never is missing)" in err and not tree.alive()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("waiting", [False, True], ids=["running", "waiting"])
def test_stopped_launch(tree, tmp_path, signum, status, waiting):
    row = service(tmp_path)
    row[2] = str(tmp_path / "never") if waiting else row[2]
    process = launcher(tree, tmp_path, row, job("trap 'echo job stops; exit 0' TERM; echo job; while :; do sleep 0.1; done"))
    wait_for((tmp_path / "server").exists) if waiting else process.stdout.readline()
    process.send_signal(signum)
    assert end_of(process, seconds=8)[:2] == (status, "" if waiting else "job stops\n")
    assert (tmp_path / "server").read_text() == "stopped" and not tree.alive()


def test_second_signal_cuts_the_grace_short(tree, tmp_path):
    process = launcher(tree, tmp_path, job("trap 'echo stubborn' TERM INT; echo job; while :; do sleep 0.1; done"), grace_s=60)
    assert process.stdout.readline() == "job\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stubborn\n"
    process.send_signal(signal.SIGINT)
    assert end_of(process, seconds=8)[0] == 130 and not tree.alive()


def test_nothing_outlives_a_killed_launcher(tree, tmp_path):
    process = launcher(tree, tmp_path, service(tmp_path, STUBBORN), job("echo job; sleep 300"), grace_s=1)
    assert process.stdout.readline() == "job\n"
    process.kill()
    process.communicate()
    tree.assert_gone(seconds=15)


# ---- the launcher's own parts


def test_readiness_is_a_real_answer(tmp_path):
    asked = []

    class Engine(BaseHTTPRequestHandler):
        status = 503

        def do_POST(self):
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(self.status)
            self.end_headers()
            self.wfile.write(b"loading")

        def log_message(self, *_):
            """Not in the test's output."""

    assert extractor_ready(tmp_path / "0.json") == "it has not registered yet"
    server = HTTPServer(("127.0.0.1", 0), Engine)
    url = f"http://127.0.0.1:{server.server_port}"
    (tmp_path / "0.json").write_text(json.dumps({"url": url, "pid": 1}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert extractor_ready(tmp_path / "0.json") == f"{url} answers 503: loading"
    Engine.status = 200
    assert extractor_ready(tmp_path / "0.json") is None
    assert asked[-1][0] == "/v1/completions" and asked[-1][1]["max_tokens"] == 1 and asked[-1][1]["prompt"]
    server.shutdown()
    server.server_close()
    assert extractor_ready(tmp_path / "0.json") == f"{url} does not answer (ConnectError)"


def test_one_launch_a_run_folder(tmp_path):
    holder = rf"in use by launch {os.getpid()} on \S+; wait for its end"
    with exclusive(tmp_path / "run"), pytest.raises(PlainError, match=holder), exclusive(tmp_path / "run"):
        pass
    with exclusive(tmp_path / "run"):
        pass


def test_run_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=str(tmp_path / "file" / "run")), exclusive(tmp_path / "file" / "run"):
        pass
