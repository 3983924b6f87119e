# Each target sets up its own virtual environment in .venv; the README explains the plain commands behind them.
# `make demo ARGS="--text some/folder"` passes options on.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-slow faults lint clean

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV): torch, lightning, transformers and the test tools; this takes some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py $(ARGS)

test: $(STAMP) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m slow

faults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -c /dev/null --rootdir=. tests/faults

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) runs lightning_logs
