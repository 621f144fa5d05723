PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types contracts tests bench format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(READY)  ## a virtual environment in .venv with Weft and everything that the other verbs need

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Weft needs Python 3.11 or later; try make PYTHON=python3.12"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,examples]'
	touch $@

demo: $(READY)  ## trains the digits job on two workers and shows where the time went
	$(BIN)/weft run examples/digits.toml --workers 2

test: lint types contracts tests  ## everything that must pass before a commit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports --no-cache

tests: $(READY)
	$(BIN)/pytest

bench: $(READY)  ## the benchmarks, or one: make bench ONLY=pipeline
	$(BIN)/python benchmarks/run.py $(ONLY)

format: $(READY)  ## rewrites the sources in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## removes what make has made
	rm -rf $(VENV) build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
