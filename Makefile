# make bench    the main job: checks and times everything this machine can run
# make test     all tests
# make check    lint, format and types
# make traps    break the code for every known trap and watch a test fail
#
# Each makes .venv first and needs Python and git alone. TORCH chooses what is installed first, e.g.
#   make test TORCH=torch==2.13.0

PYTHON ?= python3
TORCH ?= torch>=2.10
PYTEST_ARGS ?= -q -n auto
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: bench test check traps format clean

bench: $(READY)
	$(BIN)/python -m dsv4.bench

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff check dsv4 tests
	$(BIN)/ruff format --check dsv4 tests
	$(BIN)/mypy

traps: $(READY)
	$(BIN)/python -m tests.traps

format: $(READY)
	$(BIN)/ruff check --fix dsv4 tests
	$(BIN)/ruff format dsv4 tests

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[hf,bench,test,dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache dist build
