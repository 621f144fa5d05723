PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
unexport PYTHONDONTWRITEBYTECODE  # tests start some hundred daemons, each of which would compile all sources anew
# Of benchmarks it is asked only whether they call what there is: nobody runs all of them after each change.
LOOSELY := arg-type assignment import-not-found index misc no-any-return no-untyped-call operator

.DEFAULT_GOAL := help
.PHONY: help install demo observability check-observability test lint types contracts large quick exhaustive soak bench
.PHONY: format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(READY)  ## a virtual environment in .venv with Weft and everything that the other verbs need

# compat: by its path, so that beside a clone called `weft` a script's `import weft` finds the package in it, not it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Weft needs Python 3.11 or later; try make PYTHON=python3.12"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --config-settings editable_mode=compat \
	  --editable '.[dev,examples,gpu,plots,tensorboard]'
	touch $@

demo: $(READY)  ## trains the digits job on two workers and shows where the time went
	$(BIN)/weft run examples/digits.toml --workers 2

observability: $(READY)  ## a real Prometheus with Weft's rules and alerts beside the running daemon, until Ctrl-C
	$(BIN)/python observability/serve.py

check-observability: $(READY)  ## boards, rules and alerts against a real run; PICTURES=DIR keeps pictures of the boards
	$(BIN)/python observability/check.py $(if $(PICTURES),--pictures $(PICTURES))

test: $(READY)  ## everything that must pass before a commit: first what is quick, of two things at a time
	$(MAKE) --jobs=2 --output-sync --no-print-directory lint quick-1 quick-0 types contracts
	$(MAKE) --no-print-directory large

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy
	$(BIN)/mypy --no-warn-unused-ignores $(LOOSELY:%=--disable-error-code %) benchmarks

contracts: $(READY)
	$(BIN)/lint-imports --no-cache

large: $(READY)  ## the tests that quick leaves out
	$(MAKE) --jobs=3 --output-sync --no-print-directory large-0 large-1 large-2

large-%: $(READY)
	$(BIN)/pytest -m 'not quick and not soak' --part=$*/3

quick: $(READY)  ## the small tests alone, which make test begins with: within two minutes
	$(MAKE) --jobs=2 --output-sync --no-print-directory quick-0 quick-1

quick-%: $(READY)
	$(BIN)/pytest -m quick --part=$*/2

exhaustive: $(READY)  ## all tests, with the whole products of axes where make test has few rows: an hour and a half
	$(BIN)/pytest --exhaustive

soak: $(READY)  ## what Weft promises, tried for as long as it is given: make soak HOURS=2 SEED=7 ONLY=F1,F4 WRITE=1
	$(BIN)/python tests/soak/soak.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(HOURS),--hours $(HOURS)) \
	  $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) \
	  $(if $(DAEMONS),--daemons $(DAEMONS)) $(if $(WRITE),--write docs/reliability.md) $(if $(ADD),--add)

bench: $(READY)  ## the benchmarks, or one: make bench ONLY=pipeline
	$(BIN)/python benchmarks/run.py $(ONLY)

format: $(READY)  ## rewrites the sources in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## removes what make has made
	rm -rf $(VENV) build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
