# Everyday commands. `make` alone lists them; every target creates the environment it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BENCH  ?=
JOBS   ?= 3
RESUME ?=
SHELL  := /bin/bash
# The tests start hundreds of processes: each would compile everything again where bytecode is not kept.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check unit lint types imports bench bench-quick bench-layouts clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(BIN)/.app: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, found {v[0]}.{v[1]}; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(BIN)/.dev: $(BIN)/.app
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(BIN)/.bench: $(BIN)/.app
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@

demo: $(BIN)/.app ## kill a worker in the middle of a task, see another one continue where it stopped
	@$(BIN)/python examples/crash_and_continue.py

test: lint types imports ## every rule, refusal and fault once; what continuous integration runs
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

test-all: lint types imports ## the same with all seeds, full products and both servers (long)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --servers=all --full

check: lint types imports unit ## the fast part: format, lint, types, imports, unit tests

unit: $(BIN)/.dev
	$(BIN)/python -m pytest tests/unit

lint: $(BIN)/.dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .

types: $(BIN)/.dev
	$(BIN)/mypy

imports: $(BIN)/.dev
	$(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache

bench: $(BIN)/.bench ## measure against the raw loop and peers, write build/bench.json (BENCH=prefix or table, RESUME=1)
	$(BIN)/python -m benchmarks --select "$(BENCH)" --out build/bench.json $(if $(RESUME),--resume)

bench-quick: $(BIN)/.bench ## the same with smaller sizes
	$(BIN)/python -m benchmarks --quick --select "$(BENCH)" --out build/bench.json $(if $(RESUME),--resume)

bench-layouts: $(BIN)/.bench ## compare the candidate storage layouts (long)
	$(BIN)/python -m benchmarks.layouts

clean: ## remove environment, caches and build output
	rm -rf $(VENV) build .mypy_cache .ruff_cache .hypothesis .pytest_cache
