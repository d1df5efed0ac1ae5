# What people and CI call. Everything runs from .venv, which scripts/environment.sh makes and keeps up to date.
# PYTHON chooses the interpreter: make setup PYTHON=python3.12
SHELL := /bin/bash
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast check docs evidence gpu-check clean

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | column -t -s '|'

setup: ## Make .venv with the full CPU environment.
	@scripts/environment.sh full

demo: ## Watch an agent learn to use a tool: make what that needs, then run `headrace train lookup`.
	@scripts/environment.sh demo
	@.venv/bin/headrace train lookup

test: ## Lint, types and all tests: fast, real, heavy.
	@scripts/system.sh
	@scripts/environment.sh full
	@.venv/bin/python tests/runner.py

test-fast: setup ## The fast tests alone.
	@.venv/bin/python tests/runner.py fast

check: setup ## What must hold before a commit: format, lint, types, layers, fast tests.
	@.venv/bin/python tests/runner.py lint fast

docs: setup ## Build the documentation site into site/.
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

evidence: setup ## Run the benchmarks and write benchmarks/results/DATE.json.
	@.venv/bin/python scripts/evidence.py

# Its environment is one for GPUs, which the locks are not (docs/gpu.md).
gpu-check: ## Check and measure on one GPU what runs there, in at most 8 minutes; without a GPU it says so.
	@$(or $(PYTHON),$(firstword $(wildcard .venv-gpu/bin/python .venv/bin/python) python3)) -m scripts.gpu_check

clean: ## Remove what builds and tools leave behind; .venv and runs/ stay.
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
