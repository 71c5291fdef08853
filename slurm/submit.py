"""Submit work of a recipe to Slurm: `python -m slurm.submit CONFIG [key=value…] [STAGE options] [-- ARGUMENTS]`.

    --stage train       one job by slurm/run.sbatch, as large as the recipe says; with `--extractors N` its extractors are an array
                        of jobs of their own, which may join and leave while it trains
    --stage extractors  only those: --extractors more for a run that goes on
    --stage prepare     an array of --shards tasks of extract.prepare_data, and one more that puts their parts together
    --stage capture     an array of --shards tasks of extract.capture, each with an extractor of its own
    --stage rollout     a task for each file of prompts: ARGUMENTS
    --stage evaluate    a task for each draft: ARGUMENTS

Each task goes on where it was: submit again what has failed. `launch.slurm` has the options of sbatch. Needs no accounting.
With `--task I` the I-th task of a stage runs here and now, as in slurm/extract.sbatch and slurm/prepare_data.sbatch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import submitit
from submitit.core.utils import pickle_load

from configs.command import command
from configs.load import parse
from configs.schema import Config
from slurm.follow import follow, write_status
from slurm.nodes import ask_slurm
from slurm.roles import environment

LOOK_S = 2.0


@dataclass
class Task(submitit.helpers.Checkpointable):
    """One task of an array: a command that may be run again, as Slurm does after a preemption, and then goes on where it was."""

    command: list[str]

    def __call__(self) -> None:
        subprocess.run(self.command, check=True, env=environment(1))


def tasks(stage: str, config: Config, arguments: list[str], shards: int, extra: list[str]) -> list[Task]:
    """The commands of an array; `arguments` are CONFIG and overrides. Only the last of `prepare` waits for the others."""
    train, launcher = str(config.python.train or sys.executable), [sys.executable, "-m", "slurm.launch"]

    def beside_an_extractor(name: str, *command: str) -> Task:
        own = [f"run_dir={config.run_dir / stage / name}", f"store.path={config.store.path / stage / name}"]  # and a master
        return Task([*launcher, *arguments, *own, "--", train, "-m", command[0], *arguments, *own, *command[1:]])

    if stage == "prepare":
        return [Task([train, "-m", "extract.prepare_data", *arguments, "--shard", f"{i}/{shards}", *extra]) for i in range(shards)]
    if stage == "capture":
        return [beside_an_extractor(str(i), "extract.capture", "--shard", f"{i}/{shards}", *extra) for i in range(shards)]
    if stage == "rollout":
        answers = config.run_dir / "rollouts"
        files = [Path(file) for file in extra]
        return [beside_an_extractor(f.stem, "extract.rollout", "--prompts", str(f), "--output", str(answers / f.name)) for f in files]
    evaluate = [train, "-m", "train.evaluate", *arguments]
    return [Task([*evaluate, f"run_dir={config.run_dir / stage / Path(draft).name}", "--draft", draft]) for draft in extra]


def submit_array(config: Config, name: str, work: list[Task], launches: bool = False, after: str | None = None) -> list:
    """Submit tasks as one array; submitit's jobs. Tasks that launch an extractor get its nodes and GPUs, and use srun themselves."""
    executor = submitit.AutoExecutor(folder=config.run_dir / "submitit" / name, cluster="slurm")
    options = config.launch.slurm | ({"dependency": f"afterok:{after}", "kill-on-invalid-dep": "yes"} if after else {})
    executor.update_parameters(
        name=f"dspark-{name}",
        nodes=config.extract.nodes if launches else 1,
        tasks_per_node=1,
        timeout_min=config.launch.minutes,
        slurm_array_parallelism=len(work),
        slurm_setup=["trap : TERM"],  # the batch shell dies last: Slurm takes its end for the task's
        slurm_use_srun=not (launches and config.launch.trainer_nodes),
        slurm_additional_parameters=options | ({"gpus-per-node": config.launch.gpus} if launches and config.launch.gpus else {}),
    )
    with executor.batch():
        return [executor.submit(task) for task in work]


def submit_training(config: Config, arguments: list[str]) -> str:
    """The job's number. Raises NodeError."""
    launch = config.launch
    nodes = launch.extractors * config.extract.nodes + launch.trainer_nodes
    size = {"nodes": max(1, nodes), "time": launch.minutes, "gpus-per-node": launch.gpus, "output": config.run_dir / "slurm-%j.log"}
    options = [f"--{key}={value}" for key, value in (size | launch.slurm).items()]
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return ask_slurm("sbatch", "--parsable", *options, str(Path(__file__).with_name("run.sbatch")), *arguments).strip()


def wait(jobs: list) -> int:
    """Say what becomes of an array's tasks until Slurm knows none of them any more; how many have not ended well."""
    arrays, before = ",".join({job.job_id.split("_")[0] for job in jobs}), None
    while True:
        states = subprocess.run(["squeue", "-h", "-r", "-j", arrays, "-o", "%T"], text=True, capture_output=True).stdout.split()
        ended = [pickle_load(job.paths.result_pickle)[0] for job in jobs if job.paths.result_pickle.exists()]
        done = ended.count("success")
        now = f"{done} of {len(jobs)} tasks done, {len(ended) - done} failed, {states.count('RUNNING')} running"
        if now != before:
            before = now
            print(now, flush=True)
        if not states:
            return len(jobs) - done
        time.sleep(LOOK_S)


@command("slurm.submit")
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="slurm.submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=["train", "extractors", "prepare", "capture", "rollout", "evaluate"], default="train")
    parser.add_argument("--shards", type=int, default=4, metavar="N", help="tasks of prepare and capture (default: %(default)s)")
    parser.add_argument("--extractors", type=int, default=0, metavar="N", help="extractors of training as jobs of their own")
    parser.add_argument("--task", type=int, metavar="I", help="submit nothing: be this task of the stage's array, from 0")
    parser.add_argument("--follow", action="store_true", help="stay until it is over; exit status 0 where it ended well")
    args, config = parse(parser, argv[:end])
    arguments, extra = [args.config, *args.overrides], argv[end + 1 :]
    if args.task is not None:
        task = tasks(args.stage, config, arguments, args.shards, extra)[args.task]
        os.execvpe(task.command[0], task.command, environment(1))
    if args.stage == "train":
        write_status(config.run_dir, {"state": "submitted"})  # what an earlier job has left is over
    if args.extractors:
        join = [Task([sys.executable, "-m", "slurm.launch", "--join", *arguments])] * args.extractors
        extractors = submit_array(config, "extractors", join, launches=True)
        print(f"extractors: array {extractors[0].job_id.split('_')[0]}, logs in {extractors[0].paths.folder}")
        arguments += ["launch.extractors=0", f"pool.min_extractors={config.pool.min_extractors or 1}"]
        config = config.model_copy(update={"launch": config.launch.model_copy(update={"extractors": 0})})
    if args.stage == "extractors":
        return 0
    if args.stage == "train":
        job = submit_training(config, arguments)
        print(f"training: job {job}, logs in {config.run_dir}/slurm-{job}.log and {config.run_dir}/logs")
        return 0 if not args.follow or follow(config, job) == "done" else 1
    work = tasks(args.stage, config, arguments, args.shards, extra)
    jobs = submit_array(config, args.stage, work, launches=args.stage in ("capture", "rollout"))
    print(f"{args.stage}: array {jobs[0].job_id.split('_')[0]} of {len(jobs)} tasks, logs in {jobs[0].paths.folder}")
    if args.stage == "prepare":
        parts_together = Task([str(config.python.train or sys.executable), "-m", "extract.prepare_data", *arguments, *extra])
        jobs += submit_array(config, "join", [parts_together], after=jobs[0].job_id.split("_")[0])
    return 0 if not args.follow or not wait(jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
