# Each target does all its own set-up: only Python 3.11 to 3.13 and make are needed.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
WORKERS ?= 2

.PHONY: quickstart test test-slow lint format bench install install-dev clean

quickstart: .venv/base  ## fine-tune a genuine model on this machine's CPU, and show its answers before and after
	$(BIN)/python tools/real_inputs.py smollm2
	$(BIN)/podtune run recipes/quickstart.yaml

test: lint  ## everything that must pass before a commit
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile -m "not slow"

test-slow: .venv/dev  ## the tests that take minutes
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile -m slow

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: .venv/dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: .venv/dev  ## every benchmark; each prints one ratio and how to repeat it
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

install: .venv/base
install-dev: .venv/dev

# The stamps are made last, so an install that was broken off is begun again.
.venv/base: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) .
	touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[dev]'
	touch .venv/base $@

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11, 3.12 or 3.13 found; name one: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 2; }

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
