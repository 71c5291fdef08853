"""A real Slurm on this machine: slurmctld on a login node, slurmd on each node, and each of them in namespaces of its own, so with
a host name, processes, a /dev/shm, ports and two networks (eth0 to manage, fab0 the fabric) of its own. Files are shared.

Nothing outside the cluster's folder is touched, and everything ends with one process. Needs root, iproute2 and Debian's packages
slurm-wlm and munge. Facts about Slurm that this rests on:
- gpus must be device files, named with a number at the end; CPUs and memory are believed as configured (config_overrides)
- cred_expire is also how long a requeued job waits; job ids of a fresh cluster begin where an older one's logs do not
- MAC addresses are fixed: after crash and boot the others' tables still hold
- nothing kills what has left the process tree (there are no cgroups here): the epilog writes that down, then kills it
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

GPUS = 4
SLURMD = 6818  # the port that it listens at
NAMESPACES = ["--net", "--uts", "--mount", "--pid", "--ipc"]
DELAY_S = 5  # of a requeued job

CONF = """\
ClusterName=tests
SlurmctldHost=head(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={delay}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/state/slurmctld.pid
SlurmdPidFile={folder}/spool/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
MessageTimeout=10
KillWait={kill_wait}
CompleteWait=0
MinJobAge=86400
JobRequeue=1
FirstJobId={first}
Epilog={folder}/epilog
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=200000,requeue_delay=1
NodeName=node[1-{nodes}] NodeAddr=10.77.0.[1-{nodes}] CPUs=16 RealMemory=16000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE DefMemPerNode=1000 State=UP
"""

EPILOG = """\
#!/bin/bash
for p in /proc/[0-9]*; do
    grep -qzx "SLURM_JOB_ID=$SLURM_JOB_ID" "$p/environ" 2>/dev/null || continue
    line=$(tr '\\0' ' ' <"$p/cmdline" 2>/dev/null)
    case $line in "" | *epilog* | *slurmstepd*) continue ;; esac
    echo "$SLURM_JOB_ID $SLURMD_NODENAME $line" >>{folder}/log/strays
    kill -9 "${{p#/proc/}}"
done
exit 0
"""


def missing() -> str | None:
    """Why there can be no cluster here."""
    if os.geteuid():
        return "namespaces need root"
    wanted = ("slurmctld", "slurmd", "munged", "ip", "unshare", "nsenter")
    return next((f"{name} is not installed" for name in wanted if not shutil.which(name, path=PATH)), None)


PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class Cluster:
    def __init__(self, folder: Path, nodes: int, kill_wait: int = 30):
        self.folder, self.nodes = folder, [f"node{number}" for number in range(1, nodes + 1)]
        for name in ("munge", "state", "spool", "log", "dev", "run"):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o711)
        (folder / "munge" / "key").write_bytes(os.urandom(1024))
        (folder / "munge" / "key").chmod(0o600)
        facts = dict(folder=folder, nodes=nodes, gpus=GPUS, delay=DELAY_S, kill_wait=kill_wait, first=int(time.time()) % 50_000 * 10 + 1000)
        (folder / "slurm.conf").write_text(CONF.format(**facts))
        for gpu in range(GPUS):
            os.mknod(folder / "dev" / f"gpu{gpu}", 0o20666, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"NodeName=node[1-{nodes}] Name=gpu File={folder}/dev/gpu[0-{GPUS - 1}]\n")
        (folder / "epilog").write_text(EPILOG.format(folder=folder))
        (folder / "epilog").chmod(0o755)
        hosts = ["127.0.0.1 localhost", "10.77.0.254 head", *(f"10.77.0.{number} {name}" for number, name in enumerate(self.nodes, 1))]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        self.env = os.environ | {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self.holder = _unshare(self.env, folder / "log" / "head.out", "head", folder, nodes)
        self._wait(lambda: self("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == str(nodes), 60, "Slurm did not come up")

    def __call__(self, *command: str | Path, check: bool = True, cwd: Path | None = None, env: dict | None = None) -> str:
        """What a command prints on the login node."""
        enter = ["nsenter", "--target", str(_inner(self.holder.pid)), *NAMESPACES, f"--wd={cwd or self.folder}"]
        done = subprocess.run([*enter, *map(str, command)], env=self.env | (env or {}), text=True, capture_output=True)
        assert not check or not done.returncode, done.stderr
        return done.stdout

    def sbatch(self, *arguments: str | Path, cwd: Path, env: dict | None = None) -> str:
        return self("sbatch", "--parsable", *arguments, cwd=cwd, env=env).strip()

    def job(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "--oneliner", "show", "job", job)))

    def wait(self, job: str, state: str, seconds: float, log: Callable[[], str]) -> None:
        """Until the job is in this state; fails with its log where it ends in another."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"} - {state}

        def there():
            facts = self.job(job)
            assert facts["JobState"] not in over, f"{facts['JobState']}\n{log()}"
            return facts["JobState"] == state

        self._wait(there, seconds, f"job {job} is not {state}")

    def wait_empty(self, seconds: float = 30) -> None:
        """No job is left on any node, and no job has left a process behind."""
        self._wait(lambda: not self("squeue", "-h"), seconds, "jobs are left")
        strays = self.folder / "log" / "strays"
        assert not strays.exists(), strays.read_text()

    def crash(self, node: str) -> None:
        """The node loses its power."""
        os.kill(self.pid(node), signal.SIGKILL)

    def boot(self, node: str) -> None:
        self("python3" if not sys.executable else sys.executable, __file__, "boot", self.folder, node.removeprefix("node"))

    def pid(self, node: str) -> int:
        """Process 1 of a node, as this machine knows it."""
        return _inner(int(self._outer((self.folder / "run" / node).read_text())))

    def shared_memory(self, node: str) -> list[str]:
        return os.listdir(f"/proc/{self.pid(node)}/root/dev/shm")

    def ports(self, node: str) -> set[int]:
        """That something listens at."""
        lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/{self.pid(node)}/net/{kind}").read_text().splitlines()]
        return {int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == "0A"}

    def down(self) -> None:
        self.holder.kill()
        self.holder.wait()

    def _outer(self, inner: str) -> str:
        """This machine's number of a process that the login node knows by another."""
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                if f"NSpid:\t{status.parent.name}\t{inner}\n" in status.read_text():
                    return status.parent.name
        raise LookupError(inner)

    @staticmethod
    def _wait(what, seconds: float, problem: str) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, problem
            time.sleep(0.2)


def _unshare(env, log: Path, *arguments) -> subprocess.Popen:
    command = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "--kill-child=KILL", sys.executable, __file__, *map(str, arguments)]
    with log.open("wb") as output:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)


def _inner(outer: int) -> int:
    """The child of `unshare`, which is process 1 in its namespace."""
    end = time.monotonic() + 10
    while not (children := Path(f"/proc/{outer}/task/{outer}/children").read_text().split()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return int(children[0])


# ---- inside


def _do(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True)


def _shared(host: str) -> None:
    _do("mount", "--make-rprivate", "/")
    _do("hostname", host)
    _do("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    _do("ip", "link", "set", "lo", "up")


def _reap() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.1)


def _head(folder: Path, nodes: int) -> None:
    _shared("head")
    _do("mount", "--bind", folder / "hosts", "/etc/hosts")
    for name, net in (("mgmt", "10.77.0"), ("fabric", "10.78.0")):
        _do("ip", "link", "add", name, "type", "bridge")
        _do("ip", "addr", "add", f"{net}.254/24", "dev", name)
        _do("ip", "link", "set", name, "up")
    munge = folder / "munge"
    files = [
        f"--{what}={munge / name}" for what, name in (("socket", "socket"), ("key-file", "key"), ("log-file", "log"), ("pid-file", "pid"))
    ]
    _do("munged", "--force", *files, f"--seed-file={munge / 'seed'}")
    _do("slurmctld")
    for number in range(1, nodes + 1):
        _boot(folder, number)
    _reap()


def _boot(folder: Path, number: int) -> None:
    """Called on the login node: a node, with a cable to each bridge."""
    holder = _unshare(os.environ, folder / "log" / f"node{number}.out", "node", folder, number)
    inner = _inner(holder.pid)
    (folder / "run" / f"node{number}").write_text(str(holder.pid))
    while os.readlink(f"/proc/{inner}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    for bridge, end in (("mgmt", "eth0"), ("fabric", "fab0")):
        subprocess.run(["ip", "link", "del", f"{bridge}{number}"], capture_output=True)
        _do("ip", "link", "add", f"{bridge}{number}", "type", "veth", "peer", "name", end, "netns", inner)
        _do("ip", "link", "set", f"{bridge}{number}", "master", bridge, "up")


def _node(folder: Path, number: int) -> None:
    _shared(f"node{number}")
    for name, net, mark in (("eth0", "10.77.0", "4d"), ("fab0", "10.78.0", "4e")):
        while not Path(f"/sys/class/net/{name}").exists() and subprocess.run(["ip", "link", "show", name], capture_output=True).returncode:
            time.sleep(0.01)
        _do("ip", "link", "set", name, "address", f"02:00:00:{mark}:00:0{number}")
        _do("ip", "addr", "add", f"{net}.{number}/24", "dev", name)
        _do("ip", "link", "set", name, "up")
    (folder / "spool" / f"node{number}").mkdir(exist_ok=True)
    subprocess.Popen(["slurmd", "-D", "-N", f"node{number}"])
    _reap()


if __name__ == "__main__":
    what, folder, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    {"head": _head, "node": _node, "boot": _boot}[what](folder, number)
