"""The GPU's checks themselves, small and on a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tiny import ROOT, python_environment


@pytest.mark.integration
def test_the_checks_for_a_gpu_know_right_from_wrong():
    env = python_environment() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "tests/gpu/check.py", "--cpu"], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(line.startswith("| ok") for line in done.stdout.splitlines()) >= 7


def test_without_a_gpu_it_says_so():
    done = subprocess.run(["tests/gpu/check.sh", sys.executable], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "no CUDA device here" in done.stdout
