"""Jobs on a real Slurm of five nodes: each ends as it should, says why, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from datasets import load_from_disk
from processes import Tree, wait_for
from safetensors.torch import load_file
from slurm_cluster import SLURMD, Cluster, missing
from tiny import ROOT, VLLM, write_recipe

from configs.load import load
from extract.capture import RECORD, Captured
from extract.prepare_data import main as prepare_data
from slurm.sizes import Facts
from store.cache import DurableCache
from store.local import LOCK

pytestmark = [pytest.mark.integration, pytest.mark.skipif(missing() is not None, reason=f"no Slurm: {missing()}")]

SIZE = ["--mem=3000", "--gpus-per-node=1"]  # so that jobs share nodes
START_S = 240
END_S = 60  # of a busy machine; the slowest way out takes the grace and Slurm's own
STEPS = 150
PATHS = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
ENVIRONMENT = {"DSPARK_PYTHON": sys.executable, "PYTHONPATH": PATHS, "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=5)
    yield cluster
    cluster.down()


@pytest.fixture(scope="module")
def data(tiny_verifier, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("slurm_data")
    rows = [{"id": str(seed), "prompt_ids": list(range(9)), "response_ids": list(range(seed, seed + 90))} for seed in range(8)]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row | {"finish_reason": "length"}) + "\n" for row in rows))
    recipe = write_recipe(folder, tiny_verifier("llama"))
    assert not prepare_data([str(recipe), "--data", str(folder / "rollouts.jsonl"), "--output", str(folder / "data")])
    return folder / "data"


@dataclass
class Job:
    """A submitted run: its folder, and what belongs to it on any node."""

    cluster: Cluster
    tree: Tree
    recipe: Path
    number: str

    @property
    def run(self) -> Path:
        return self.recipe.parent / "run"

    @property
    def status(self) -> dict:
        file = self.run / "status.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def steps(self) -> int:
        log = self.run / "metrics.jsonl"
        return max((json.loads(line)["step"] for line in log.read_text().splitlines()), default=0) if log.exists() else 0

    def wait_for_steps(self, steps: int = 3) -> None:
        def there():
            assert self.cluster.job(self.number)["JobState"] in ("PENDING", "RUNNING"), self.log()
            return self.steps() >= steps

        wait_for(there, START_S)

    def pids(self, command: str) -> list[int]:
        """Processes of this command on any node, without those that started it."""
        return [pid for pid, line in self.tree.alive().items() if command in line and "slurm.role" not in line]

    def log(self) -> str:
        return "\n".join(file.read_text() for file in (*self.recipe.parent.glob("*.log"), *self.run.glob("logs/*.log")))

    def wait(self, state: str, seconds: float = END_S) -> None:
        self.cluster.wait(self.number, state, seconds, self.log)
        self.tree.assert_gone(seconds=10)
        assert not list((self.run / "extractors").glob("*"))
        assert {file.name for file in (self.recipe.parent / "store").glob("*")} <= {LOCK}


@pytest.fixture
def submit(cluster, data, tiny_verifier, tmp_path):
    """submit(name, extractors, trainer_nodes, **sections) -> Job, from a folder that has nothing to do with it."""
    jobs = []

    def submit(name: str, extractors: int = 1, trainer_nodes: int = 2, arguments: tuple[str, ...] = (), **sections) -> Job:
        tree = Tree()
        train = {"epochs": 100_000, "global_batch": 4, "num_anchors": 8, "log_every": 1, "checkpoint_every": 1000}
        shape = {"extractors": extractors, "trainer_nodes": trainer_nodes, "interface": "fab0", "ready_s": START_S, "grace_s": 5}
        overrides = {
            "data": {"path": str(data)},
            "extract": {"batch_size": 1} | sections.pop("extract", {}),
            "train": train | sections.pop("train", {}),
            "launch": shape | sections.pop("launch", {}),
            **sections,
        }
        recipe = write_recipe(tmp_path / name, tiny_verifier("llama"), overrides)
        code, elsewhere = tmp_path / "the code", tmp_path / "else where"
        elsewhere.mkdir(exist_ok=True)
        if not code.is_symlink():
            code.symlink_to(ROOT)
        nodes = f"--nodes={extractors + trainer_nodes}"
        output = f"--output={recipe.parent}/job.log"
        env = tree.env | ENVIRONMENT
        number = cluster.sbatch(nodes, *SIZE, output, code / "slurm" / "run.sbatch", recipe, *arguments, cwd=elsewhere, env=env)
        jobs.append(Job(cluster, tree, recipe, number))
        return jobs[-1]

    yield submit
    for job in jobs:
        cluster("scancel", job.number, check=False)
    cluster.wait_empty()
    for node in cluster.nodes:
        assert not cluster.shared_memory(node) and cluster.ports(node) == {SLURMD}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Where the weights of an undisturbed run are kept, for the disturbed one to be compared with."""
    return tmp_path_factory.mktemp("finished")


def weights(run: Path) -> dict:
    checkpoints = run / "checkpoints"
    return load_file(checkpoints / (checkpoints / "latest").read_text() / "draft.safetensors")


def test_two_good_runs_at_once(submit, finished):
    """One extractor and two trainer nodes beside two and two, on five nodes, from a folder with a blank."""
    first = submit("one and two", train={"max_steps": STEPS})
    second = submit("two and two", extractors=2, train={"max_steps": 20})
    for job, nodes in ((first, 3), (second, 4)):
        job.wait("COMPLETED", START_S)
        assert job.status["state"] == "done" and len(job.status["nodes"]) == nodes, job.status
        assert job.status["code"] == 0 and "reason" not in job.status and (job.run / "finished.json").exists()
    logs = (second.run / "logs" / "extractor-1.log").read_text()
    assert "http://10.78.0." in logs and "extractor-1 is ready" in second.log()
    assert "0: " in (first.run / "logs" / "trainers.log").read_text()
    records, plan = [json.loads(line) for line in (first.run / "metrics.jsonl").read_text().splitlines()], Facts(load(first.recipe))
    fetched = sum(record["store"]["fetched_bytes"] for record in records)  # by the first of two ranks
    assert 2 * fetched == pytest.approx(sum(record["tokens"] for record in records) * plan.stored_token, rel=0.1)
    assert 0 < max(record["store"]["bytes"] for record in records) <= plan.peak
    shutil.copytree(first.run / "checkpoints", finished / "checkpoints")


@pytest.mark.parametrize(("victim", "waiting"), [("trainers", False), ("extractor-0", False), ("extractor-0", True)])
def test_a_dead_role_ends_the_job(submit, victim, waiting):
    job = submit(victim, trainer_nodes=2 if victim == "trainers" else 1)
    if not waiting:
        job.wait_for_steps()
    os.kill(wait_for(partial(job.pids, "-m extract.serve" if victim == "extractor-0" else "-m train "), START_S)[0], signal.SIGKILL)
    job.wait("FAILED")
    status = job.status
    assert status["state"] == "failed" and status["role"] == victim and victim in status["reason"] and status["code"] != 0
    assert Path(status["log"]).name == f"{victim}.log"
    assert f"launch: {victim} " in (job.recipe.parent / "job.log").read_text()


@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "training"])
def test_scancel(submit, cluster, waiting):
    job = submit("cancelled", trainer_nodes=1)
    if waiting:
        wait_for(lambda: job.status.get("state") == "starting", START_S)
    else:
        job.wait_for_steps()
    cluster("scancel", job.number)
    job.wait("CANCELLED")
    assert job.status["state"] == "stopped" and "SIGTERM" in job.status["reason"], job.status
    assert cluster.job(job.number)["Restarts"] == "0"


def test_out_of_time_and_a_lost_node(submit, cluster, finished):
    """The job is started again both times, goes on exactly, and ends as if nothing had been."""
    job = submit("disturbed", train={"max_steps": STEPS, "checkpoint_every": 10})
    job.wait_for_steps()
    cluster("scancel", "--batch", "--signal=USR1", job.number)
    wait_for(lambda: job.status.get("restart") == 1, START_S)
    before = job.status["before"]
    assert before["state"] == "requeued" and "role" not in before, before
    step = int((job.run / "checkpoints" / "latest").read_text().removeprefix("step_"))
    assert step >= 3
    job.wait_for_steps(step + 3)
    victim = job.status["nodes"][-1]
    cluster.crash(victim)
    wait_for(lambda: job.status.get("restart") == 2, START_S)
    before = job.status["before"]
    assert before["state"] in ("requeued", "stopping") and victim not in job.status["nodes"], job.status
    job.wait("COMPLETED", START_S)
    assert job.status["state"] == "done"
    cluster.boot(victim)
    ours, theirs = weights(job.run), weights(finished)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed here")
def test_vllm_and_mooncake_on_three_nodes(submit):
    """The real thing in miniature: vLLM extracts, Mooncake hands over, two trainer nodes of two ranks each."""
    store = {"kind": "mooncake", "mooncake": {"deadline_s": 20}}
    job = submit("real", train={"max_steps": 8}, launch={"trainers": 2, "ready_s": 900, "grace_s": 60}, extract=VLLM, store=store)
    job.wait("COMPLETED", 1200)
    assert job.status["state"] == "done" and job.steps() == 8
    assert "10.78.0." in (job.run / "logs" / "master.log").read_text()


def test_what_cannot_run_is_refused(submit):
    job = submit("refused", arguments=("store.bytes=1000",))
    job.wait("FAILED")
    assert "store.bytes" in (job.recipe.parent / "job.log").read_text() and not job.run.exists()


def test_a_job_that_leaves_a_process_behind(submit):
    """A command in the trainers' place that forks twice and makes a session of its own."""
    script = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)\n"
    job = submit("double", trainer_nodes=1, arguments=("--", sys.executable, "-c", script))
    job.wait("COMPLETED", START_S)
    assert job.status["state"] == "done"


def test_recipes_directives(cluster):
    """What run.sbatch asks for by itself is what kimi_k3.yaml takes."""
    text, recipe = (ROOT / "slurm" / "run.sbatch").read_text(), yaml.safe_load((ROOT / "configs" / "kimi_k3.yaml").read_text())
    launch = recipe["launch"]
    nodes = launch["extractors"] * recipe["extract"]["nodes"] + launch["trainer_nodes"]
    assert f"#SBATCH --nodes={nodes}\n" in text and f"#SBATCH --gpus-per-node={launch['gpus']}\n" in text


def submit_stage(cluster, recipe: Path, *arguments: str, tree: Tree) -> str:
    """What slurm.submit prints, called on the login node."""
    env = tree.env | ENVIRONMENT
    return cluster(sys.executable, "-m", "slurm.submit", recipe, *arguments, cwd=recipe.parent, env=env, check=False)


def resume(cluster, recipe: Path, script: str, *arguments: str, tree: Tree) -> None:
    """The task that failed once more, by the batch script."""
    options = ["--array=2", "--nodes=1", "--cpus-per-task=1", "--mem=2000", f"--output={recipe.parent}/%A_%a.log"]
    command = [ROOT / "slurm" / script, recipe, "--shards", "4", *arguments]
    array = cluster.sbatch(*options, *command, cwd=recipe.parent, env=tree.env | ENVIRONMENT)
    cluster.wait_empty(START_S)
    states = re.findall(r"JobState=(\w+)", cluster("scontrol", "--oneliner", "show", "job", array))
    assert states == ["COMPLETED"], [file.read_text() for file in recipe.parent.glob(f"{array}_*.log")]


def test_preparation_and_capture_as_arrays(cluster, tiny_verifier, tmp_path, tree):
    """Four tasks each, one of which is killed: started again, the data set and its states are whole."""
    store = {"path": str(tmp_path / "store"), "bytes": 16_000_000, "keep": True, "cache_path": str(tmp_path / "cache")}
    sections = {"launch": {"slurm": {"mem": 2000}, "minutes": 5, "grace_s": 5}, "store": store, "pool": {"in_flight": 1}}
    recipe = write_recipe(tmp_path, tiny_verifier("llama"), sections)
    rows = [{"id": str(seed), "prompt_ids": list(range(9)), "response_ids": list(range(seed, seed + 90))} for seed in range(200)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row | {"finish_reason": "length"}) + "\n" for row in rows))

    def submit(stage: str, *extra: str) -> list[str]:
        return submit_stage(cluster, recipe, "--stage", stage, "--shards", "4", "--follow", "--", *extra, tree=tree).splitlines()

    def third(command: str) -> list[int]:
        return [pid for pid, line in tree.alive().items() if command in line and "--shard 2/4" in line and "slurm." not in line]

    sources = ["--data", str(tmp_path / "rollouts.jsonl")]
    with ThreadPoolExecutor(1) as submitter:
        first = submitter.submit(submit, "prepare", *sources)
        os.kill(wait_for(partial(third, "extract.prepare_data"), START_S)[-1], signal.SIGKILL)
        assert "3 of 5 tasks done, 1 failed" in first.result()[-1], first.result()
    assert not (tmp_path / "data" / "data_contract.json").exists()
    resume(cluster, recipe, "prepare_data.sbatch", "--", *sources, tree=tree)
    assert not prepare_data([str(recipe), *sources])
    data = load_from_disk(tmp_path / "data")
    assert len(data) == 200

    def captured(ids: list[list[int]]) -> int:
        record, cache = tmp_path / "data" / RECORD, DurableCache(tmp_path / "cache", 1 << 30)
        contract = Captured.model_validate_json(record.read_text()).contract if record.exists() else None
        return sum(cache.has(contract, row) for row in ids) if contract else 0

    ids = data["input_ids"][2::4]
    with ThreadPoolExecutor(1) as submitter:
        first = submitter.submit(submit, "capture")
        [victim] = wait_for(partial(third, "extract.capture"), START_S)
        wait_for(partial(captured, ids), START_S)
        os.kill(victim, signal.SIGKILL)
        assert "3 of 4 tasks done, 1 failed" in first.result()[-1], first.result()
    assert 0 < captured(ids) < len(ids)
    resume(cluster, recipe, "extract.sbatch", tree=tree)
    assert captured(data["input_ids"][:]) == 200
    assert not list((tmp_path / "store").rglob("*manifest*"))


def test_rollout_and_evaluation(cluster, finished, tiny_verifier, tmp_path, tree):
    """A task for each file of prompts, then one for each draft, on their answers."""
    prompts, draft = tmp_path / "prompts.jsonl", finished / "checkpoints" / f"step_{STEPS:08d}"
    prompts.write_text("".join(json.dumps({"id": f"p{index}", "turns": [f"What is {index}?"]}) + "\n" for index in range(3)))
    answers = tmp_path / "run" / "rollouts" / prompts.name
    sections = {"launch": {"slurm": {"mem": 2000}, "minutes": 5, "grace_s": 5}, "evaluate": {"sets": [str(answers)], "max_tokens": 16}}
    recipe = write_recipe(tmp_path, tiny_verifier("llama"), sections)
    for stage, argument in (("rollout", prompts), ("evaluate", draft)):
        out = submit_stage(cluster, recipe, "--stage", stage, "--follow", "--", str(argument), tree=tree)
        assert "1 of 1 tasks done, 0 failed" in out, out
    assert len(answers.read_text().splitlines()) == 3
    assert "tokens_per_forward" in (tmp_path / "run" / "evaluate" / draft.name / "report.json").read_text()


def test_extractors_of_their_own_come_and_go(cluster, data, tiny_verifier, tmp_path, tree):
    """Two join a run that has none; one is killed and another joins while it trains; when the run is started again, with another
    master, they come along; they leave when it is over."""
    launch = {"trainer_nodes": 1, "ready_s": START_S, "grace_s": 5, "minutes": 30, "slurm": {"mem": 2000}, "interface": "fab0"}
    train = {"epochs": 100_000, "global_batch": 4, "num_anchors": 8, "log_every": 1, "checkpoint_every": 100_000}
    store = {"kind": "mooncake", "mooncake": {"deadline_s": 5}}
    sections = {"data": {"path": str(data)}, "launch": launch, "train": train, "store": store}
    recipe = write_recipe(tmp_path, tiny_verifier("llama"), sections | {"pool": {"min_extractors": 1, "deadline_s": 20}})
    out = submit_stage(cluster, recipe, "--extractors", "2", tree=tree)
    training, array = re.search(r"training: job (\d+)", out)[1], re.search(r"extractors: array (\d+)", out)[1]
    job = Job(cluster, tree, recipe, training)

    def registered() -> dict[Path, str]:
        with suppress(FileNotFoundError):  # one leaves
            files = {file: file.read_text() for file in (job.run / "extractors").glob("joined-*.json")}
            return files if len(files) == 2 else {}
        return {}

    job.wait_for_steps()
    first = wait_for(registered, START_S)
    cluster("scancel", f"{array}_0")
    submit_stage(cluster, recipe, "--stage", "extractors", "--extractors", "1", tree=tree)
    second = wait_for(lambda: (now := registered()).keys() != first.keys() and now, START_S)
    cluster("scancel", "--batch", "--signal=USR1", training)
    wait_for(lambda: job.status.get("restart") == 1, START_S)
    assert job.status["before"]["state"] == "requeued", job.status
    job.wait_for_steps(job.steps() + 3)
    third = wait_for(registered, START_S)
    assert third.keys() == second.keys() and not set(third.values()) & set(second.values())
    steps = [json.loads(line)["step"] for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    cluster("scancel", training)
    cluster.wait_empty(END_S)
    job.wait("CANCELLED")
    assert job.status["state"] == "stopped" and cluster.job(training)["Restarts"] == "1"
