# What a developer does, one word each. Everything is installed into .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROUNDS ?= 200
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt

# Tests and bench start hundreds of processes, which would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test long chaos lint bench clean

run: $(VENV)/.run
	$(BIN)/outbox demo

test: lint
	$(BIN)/python -m pytest -n 2 tests

# What takes minutes of real time; its file's name keeps it out of every other run.
long: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 tests/long/whole_scenarios.py

# Power cuts, kills and damage, each many times over; a failure prints the seed that plays it again.
chaos: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 tests/chaos --rounds $(ROUNDS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m bench

# The demo needs no tools of the developers, so that a first look is quick.
$(VENV)/.run: $(VENV)/.made pyproject.toml .ci/constraints.txt
	$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml .ci/constraints.txt
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.run

# The queues that the bench compares with; tests do without them.
$(VENV)/.bench: $(VENV)/.test
	$(PIP) -e '.[dev,bench]'
	@touch $@

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than\
	 3.11. Nothing was installed. Name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) cannot make a virtual environment. Nothing\
	 was installed. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
