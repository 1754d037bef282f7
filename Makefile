# SPDX-License-Identifier: Apache-2.0
# `make` or `make help` tells what there is. Everything runs in virtual environments made on first
# use, with exact versions from constraints/, and made anew when those or pyproject.toml change.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The Python to make environments with: make PYTHON=python3.12 test
PYTHON ?=
# More arguments for the tests or the program: make test ARGS="-k router"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml tools/setup_venv tools/find_python \
          constraints/py311.txt constraints/py312.txt constraints/lowest.txt
PYTEST_FAST := -m pytest -m "not slow"
PYTEST_SLOW := -m pytest -m slow

.PHONY: help demo serve chat test test-all test-slow test-newest test-lowest faults bench \
        kernels-report lint format build-files clean

help: ## this list
	@echo 'kvferry: prefill and decode servers for LLMs on JAX, and the KV cache carried between them.'
	@echo
	@echo 'First steps:  make demo            (Python 3.11 or later and make are all it needs)'
	@echo '              make serve           and, in another terminal, make chat'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'PYTHON=/path/to/python3 chooses the Python for a new environment; ARGS="..." goes to the'
	@echo 'program or to pytest: make chat ARGS="--max_tokens=50", make test ARGS="-k router -x".'

# --- Running ---------------------------------------------------------------------------------------

# Two servers on one machine: each would want the whole TPU, so CPU unless asked otherwise.
demo serve: export JAX_PLATFORMS ?= cpu

demo: $(VENV)/.demo ## one question through router, prefill and decode server, and what it cost
	@$(BIN)/python -m kvferry.demo.demo $(ARGS)

serve: $(VENV)/.demo ## leave the servers and the router running; Ctrl-C ends them
	@$(BIN)/python -m kvferry.demo.serve $(ARGS)

chat: $(VENV)/.demo ## talk to what `make serve` left running
	@$(BIN)/python -m kvferry.demo.chat $(ARGS)

# --- Checking --------------------------------------------------------------------------------------

test: lint ## lint, types and the fast tests: what CI runs first
	@$(BIN)/python $(PYTEST_FAST) $(ARGS)

test-slow: $(VENV)/.test ## the slow tests only (compiling for TPUs, whole-process runs)
	@$(BIN)/python $(PYTEST_SLOW) $(ARGS)

test-all: test test-slow ## test, then test-slow

test-newest: .venv312/.test ## the fast tests with the newest JAX (needs Python 3.12 or later)
	@.venv312/bin/python $(PYTEST_FAST) $(ARGS)

test-lowest: .venv-lowest/.test ## the fast tests with the lowest versions that pyproject.toml allows
	@.venv-lowest/bin/python $(PYTEST_FAST) $(ARGS)

faults: $(VENV)/.test ## servers killed, stopped and cut off in every phase: prints docs/faults.md's table
	@$(BIN)/python -m kvferry.tools.faults $(ARGS)

lint: $(VENV)/.test .cache/src/kvferry ## ruff and mypy
	@echo 'ruff'; $(BIN)/ruff check .; $(BIN)/ruff format --check .
	@echo 'mypy'; $(BIN)/mypy -p kvferry

bench: $(VENV)/.test .venv-torch/.ready ## the speed table of the README, beside transformers on torch
	@$(BIN)/python -m kvferry.bench.engine_bench --torch_python=.venv-torch/bin/python $(ARGS)
	@JAX_PLATFORMS=cpu $(BIN)/python -m kvferry.bench.pair_bench
	@JAX_PLATFORMS=cpu $(BIN)/python -m kvferry.bench.transfer_bench
	@JAX_PLATFORMS=cpu $(BIN)/python -m kvferry.bench.bootstrap_bench

kernels-report: $(VENV)/.test ## what the copy kernels move, in bytes and GB/s
	@$(BIN)/python -m kvferry.kernels.report $(ARGS)

# --- Upkeep ----------------------------------------------------------------------------------------

format: $(VENV)/.test ## rewrite the code as ruff wants it
	@$(BIN)/ruff check --fix .; $(BIN)/ruff format .

build-files: $(VENV)/.test ## write the Bazel BUILD files anew from the imports
	@$(BIN)/python -m kvferry.tools.update_build

clean: ## remove the environments and every cache
	@rm -rf .venv .venv312 .venv-lowest .venv-torch .cache dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# mypy finds the package `kvferry` through this link: the repository root is that package.
.cache/src/kvferry:
	@mkdir -p $(@D)
	@ln -sfn ../.. $@

# --- Environments ----------------------------------------------------------------------------------

# The test environment can do all that the demo's can, and must not be reduced to it.
$(VENV)/.demo: $(INPUTS)
	@extra=demo; [ ! -f $(VENV)/.test ] || extra=test; \
	  python=$$(tools/find_python 3.11 $(PYTHON)) && tools/setup_venv $(VENV) "$$python" $$extra
	@touch $@

$(VENV)/.test: $(INPUTS)
	@python=$$(tools/find_python 3.11 $(PYTHON)) && tools/setup_venv $(VENV) "$$python" test
	@touch $@ $(VENV)/.demo

.venv312/.test: $(INPUTS)
	@python=$$(tools/find_python 3.12 $(PYTHON)) && tools/setup_venv .venv312 "$$python" test
	@touch $@

.venv-lowest/.test: $(INPUTS)
	@python=$$(tools/find_python 3.11-3.11 $(PYTHON)) && \
	  tools/setup_venv .venv-lowest "$$python" test constraints/lowest.txt
	@touch $@

.venv-torch/.ready: constraints/torch.txt
	@echo 'Making .venv-torch with torch and transformers (more than a GB; without a CPU build, several)'
	@python=$$(tools/find_python 3.11 $(PYTHON)) && "$$python" -m venv .venv-torch
	@.venv-torch/bin/python -m pip install --disable-pip-version-check --quiet -r constraints/torch.txt
	@touch $@
