# Every target sets up what it needs in .venv; PYTHON may name another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Tests on real data read HARDNEG_DATA and skip without it.
HARDNEG_DATA ?= $(wildcard $(abspath ../shared/data))
export HARDNEG_DATA

.PHONY: demo test test-all lint bench docs data clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      compare the losses on scikit-learn's digits (about two minutes on two cores)"
	@echo "make test      lint, types and tests"
	@echo "make test-all  the slow tests too"
	@echo "make lint      ruff and mypy only"
	@echo "make bench     measure time and memory of the loss; writes results/"
	@echo "make data      unpack the data sets of HARDNEG_DATA into data/"
	@echo "make docs      build the documentation into site/"

# A stamp per set of extras, renewed when the dependencies change.
$(VENV)/%.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[$*]"
	touch $@

demo: $(VENV)/dev.stamp
	$(BIN)/python examples/digits.py

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 --dist=worksteal

test-all: lint
	HARDNEG_FRESH_EXAMPLES=1 $(BIN)/pytest -n 2 --dist=worksteal -m "slow or not slow"

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/loss.py

data: $(VENV)/dev.stamp
	test -n "$(HARDNEG_DATA)" || { echo "set HARDNEG_DATA to the folder of packed data sets"; exit 2; }
	$(BIN)/python -m hardneg.data.unpack "$(HARDNEG_DATA)" data

docs: $(VENV)/docs.stamp
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site
