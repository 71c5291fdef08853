"""`make demo` and `make demo-vllm` in small: the same commands on a few prompts, with the real verifier."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from configs.load import load
from train.compare import compare

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.integration
@pytest.mark.parametrize("level", ["embedded", "vllm"])
def test_make_demo(tmp_path, level):
    if level == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed here")
    run = tmp_path / "run"
    recipe = yaml.safe_load((ROOT / "configs" / f"smollm2_{level}.yaml").read_text().replace(f"runs/smollm2_{level}", str(run)))
    recipe["rollout"]["max_tokens"] = recipe["evaluate"]["max_tokens"] = 32
    recipe["train"]["epochs"] = 1
    recipe["store"]["path"] = str(tmp_path / "store")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    prompts = (ROOT / "configs" / "demo_prompts.jsonl").read_text().splitlines(keepends=True)[:14]
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))
    variables = {"CONFIG": tmp_path / "recipe.yaml", "RUN": run, "PROMPTS": tmp_path / "prompts.jsonl"}
    command = ["make", "demo", f"PY={shlex.quote(sys.executable)}", "REQUIRE=0", *(f"{name}={value}" for name, value in variables.items())]
    done = subprocess.run([*command, "-o", ".venv/installed"], cwd=ROOT, text=True, capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((run / "rollouts.jsonl").read_text().splitlines()) == 14
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] >= 2
    assert (run / "report.md").exists()
    assert not list((run / "extractors").glob("*"))
    line = compare(load(tmp_path / "recipe.yaml"), 4)
    assert float(re.search(r" and (\S+) at most", line)[1]) < 1e-5, line
