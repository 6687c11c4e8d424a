# make run    train, judge and show a case (default: cases/fp8_long_horizon.yaml); sets up .venv the first time
# make test   lint, types, import rules and all tests
#
# A machine without a GPU, and a network: point pip at PyTorch's CPU builds (200 MB instead of several GB of CUDA):
#   make run TORCH_INDEX=https://download.pytorch.org/whl/cpu

CASE ?= cases/fp8_long_horizon.yaml
ARGS ?=
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=

PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ifneq ($(TORCH_INDEX),)
PIP += --extra-index-url $(TORCH_INDEX)
endif

.PHONY: run test lint unit bench clean

run: $(VENV)/.run-ready
	$(VENV)/bin/suite run $(CASE) $(ARGS)

test: lint unit

lint: $(VENV)/.test-ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

unit: $(VENV)/.test-ready
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests --benchmark-disable $(ARGS)

bench: $(VENV)/.bench-ready
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/benchmarks --benchmark-only $(ARGS)

clean:
	rm -rf $(VENV) out

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-ready: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

$(VENV)/.test-ready: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.run-ready

$(VENV)/.bench-ready: $(VENV)/.test-ready
	$(PIP) --editable '.[dev,bench]'
	touch $@
