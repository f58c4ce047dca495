# Every target sets up what it needs in .venv; PYTHON may name another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Tests on real data read HARDNEG_DATA and skip without it.
HARDNEG_DATA ?= $(wildcard $(abspath ../shared/data))
export HARDNEG_DATA

.PHONY: demo browser test test-slow test-all test-gpu lowest lint bench docs data clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      compare ways of choosing negatives on scikit-learn's digits (three minutes, CPU)"
	@echo "make test      lint, types and the quick tests"
	@echo "make test-slow the slow tests only"
	@echo "make test-all  lint, types and all tests, on newly drawn examples"
	@echo "make test-gpu  the tests that need a CUDA device only, with the torch of PYTHON"
	@echo "make lowest    quick tests with the lowest versions of all dependencies but torch, in a fresh environment"
	@echo "make lint      ruff and mypy only"
	@echo "make bench     measure the loss, the ring and the sampler; writes results/"
	@echo "make data      unpack the data sets of HARDNEG_DATA into data/"
	@echo "make docs      build the documentation into site/"

# A stamp per set of extras, renewed when the dependencies change.
$(VENV)/%.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[$*]"
	touch $@

demo: $(VENV)/train.stamp
	$(BIN)/hardneg demo

# For the tests that open the report; without it they are skipped.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } \
	  || echo "chromium is not installed: the tests that open a browser are skipped"

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint browser
	$(BIN)/pytest -n 2 --dist=worksteal

# What `make test` leaves out.
test-slow: $(VENV)/dev.stamp browser
	$(BIN)/pytest -n 2 --dist=worksteal -m slow

test-all: lint browser
	HARDNEG_FRESH_EXAMPLES=1 $(BIN)/pytest -n 2 --dist=worksteal -m "slow or not slow"

# In the environment of PYTHON, because constraints.txt names a build of torch for CPUs.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -n 8 --dist=worksteal --durations=10 -m gpu $$(grep -rl 'mark\.gpu' tests --include='test_*.py')

lowest:
	$(PYTHON) scripts/lowest.py

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/loss.py
	$(BIN)/python benchmarks/ring.py
	$(BIN)/python benchmarks/batches.py

data: $(VENV)/dev.stamp
	test -n "$(HARDNEG_DATA)" || { echo "set HARDNEG_DATA to the folder of packed data sets"; exit 2; }
	$(BIN)/python scripts/unpack_data.py "$(HARDNEG_DATA)" data

docs: $(VENV)/docs.stamp
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site
