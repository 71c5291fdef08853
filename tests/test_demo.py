"""`make demo` in small: the same commands on a few prompts, with the real verifier."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.integration
def test_make_demo(tmp_path):
    run = tmp_path / "run"
    recipe = yaml.safe_load((ROOT / "configs" / "smollm2_embedded.yaml").read_text().replace("runs/smollm2_embedded", str(run)))
    recipe["rollout"]["max_tokens"] = recipe["evaluate"]["max_tokens"] = 32
    recipe["train"]["epochs"] = 1
    recipe["store"]["path"] = str(tmp_path / "store")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    prompts = (ROOT / "configs" / "demo_prompts.jsonl").read_text().splitlines(keepends=True)[:14]
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))
    variables = {"CONFIG": tmp_path / "recipe.yaml", "RUN": run, "PROMPTS": tmp_path / "prompts.jsonl"}
    command = ["make", "demo", f"PY={shlex.quote(sys.executable)}", "REQUIRE=0", *(f"{name}={value}" for name, value in variables.items())]
    done = subprocess.run([*command, "-o", ".venv/installed"], cwd=ROOT, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((run / "rollouts.jsonl").read_text().splitlines()) == 14
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] >= 2
    assert (run / "report.md").exists()
    assert not list((run / "extractors").glob("*"))
