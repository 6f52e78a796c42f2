# make bench        the main job: checks and times everything this machine can run
# make test         all tests
# make quick        most tests once, with few examples: about three minutes on two cores
# make check        lint, format, types, banned words, and pages of results and README up to date
# make kernels      compile all kernels of both models for ARCHS, and make a wheel of them in dist/
# make mutants      break the code for every known pitfall and watch a test fail
# make test-newest  all tests with the newest packages that pyproject.toml admits, in .venv-newest
# make constraints  the same; if all pass, write their versions to constraints/
# make docs         the site of docs/ in build/site, from an environment of its own, .venv-docs
# make test-vllm    the tests of the vLLM plugin with vLLM on the CPU, in .venv-vllm
# make dist         wheel and source distribution in dist/, their contents checked
# make release-check  builds both, installs each in an empty environment and uses it: five minutes
#
# Each makes its environment first and needs Python and git alone. All before test-newest install the
# versions in constraints/, one file per minor release of Python; test-vllm takes
# constraints/vllm.txt. Variables:
#   PYTHON       the Python that makes the environment
#   TORCH        the torch that is installed first, e.g. make test TORCH=torch==2.13.0
#   EXTRAS       extras of pyproject.toml; with an NVIDIA driver they include cute
#   CONSTRAINTS  another constraints file, or empty for the newest versions
#   VENV         folder of the environment
#   VLLM         the vLLM of make test-vllm
#   ARCHS        GPU architectures of make kernels, e.g. ARCHS="sm_90a sm_100a"

PYTHON ?= python3
TORCH ?= torch>=2.10
PYTEST_ARGS ?= -q -n auto --dist worksteal
comma := ,
EXTRAS ?= hf,bench,test,lint$(if $(shell command -v nvidia-smi 2>/dev/null),$(comma)cute)
VENV ?= .venv
ARCHS ?= sm_90a
VLLM ?= vllm==0.33.0
BIN := $(VENV)/bin
# Python compiles the modules that are imported; pip would compile all twelve thousand files.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

MINOR := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
CONSTRAINTS ?= constraints/$(MINOR).txt
READY := $(VENV)/.ready

# The file tells for what the environment was made. What differs is installed over it.
FOR := $(MINOR) $(TORCH) $(EXTRAS) $(CONSTRAINTS)
MADE_FOR := $(shell cat $(READY) 2>/dev/null)
ifneq ($(MADE_FOR),$(FOR))
.PHONY: $(READY)
endif

.PHONY: bench test quick check kernels mutants traps format test-newest constraints docs test-vllm dist release-check clean

bench: $(READY)
	$(BIN)/python -m dsv4.bench

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

quick: $(READY)
	HYPOTHESIS_PROFILE=quick OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff check dsv4 tests tools examples
	$(BIN)/ruff format --check dsv4 tests tools examples
	$(BIN)/mypy
	$(BIN)/python tools/words.py
	$(BIN)/python -m dsv4.bench report --check

# Compiled from nothing, so that what lies in the cache of this user is not published.
kernels: $(READY)
	rm -rf build/kernels && mkdir -p build/kernels
	for arch in $(ARCHS); do \
	  DSV4_CACHE_DIR=build/kernels/cache $(BIN)/python -m dsv4 warmup --arch $$arch \
	    --preset both --out build/kernels/$$arch.dsv4 || exit 1; \
	done
	$(BIN)/python tools/kernels_wheel.py dist $(ARCHS:%=build/kernels/%.dsv4)

mutants traps: $(READY)
	$(BIN)/python -m tests._tools.mutants

format: $(READY)
	$(BIN)/ruff check --fix dsv4 tests tools examples
	$(BIN)/ruff format dsv4 tests tools examples

test-newest:
	rm -rf .venv-newest
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=

constraints: test-newest
	mkdir -p constraints
	.venv-newest/bin/python tools/constraints.py write constraints/$(MINOR).txt

# A warning is an error. API pages are made from the sources, so the package is not installed.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

DOCS_REQUIREMENTS := $(shell sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ',')

.venv-docs/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $(DOCS_REQUIREMENTS)
	touch $@

dist: .venv-dist/.ready
	rm -f dist/dsv4-[0-9]*
	.venv-dist/bin/python -m build --no-isolation --outdir dist .
	$(PYTHON) tools/release_contents.py dist

.venv-dist/.ready:
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build "hatchling>=1.25"
	touch $@

release-check: dist
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" tools/release_check.sh dist

# vLLM without its dependencies: most are for GPUs, and those that a CPU needs are in the list.
VLLM_READY := .venv-vllm/.ready
VLLM_PIP := .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check
VLLM_FOR := $(MINOR) $(TORCH) $(VLLM)
ifneq ($(shell cat $(VLLM_READY) 2>/dev/null),$(VLLM_FOR))
.PHONY: $(VLLM_READY)
endif

test-vllm: $(VLLM_READY)
	VLLM_TARGET_DEVICE=cpu OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q \
	  tests/integrations/vllm

$(VLLM_READY): pyproject.toml constraints/vllm.txt
	rm -f $(VLLM_READY)
	$(PYTHON) -m venv --clear .venv-vllm
	$(VLLM_PIP) "$(TORCH)"
	$(VLLM_PIP) --no-deps -r constraints/vllm.txt "$(VLLM)"
	$(VLLM_PIP) -c constraints/vllm.txt -e ".[hf,test]"
	echo "$(VLLM_FOR)" >$(VLLM_READY)

$(READY): pyproject.toml tools/constraints.py $(CONSTRAINTS)
	rm -f $(READY)
	$(PYTHON) -m venv $(if $(filter $(MINOR),$(MADE_FOR)),,--clear) $(VENV)
	$(PIP_INSTALL) "$(TORCH)"
	$(if $(CONSTRAINTS),$(BIN)/python tools/constraints.py fit $(CONSTRAINTS) >$(VENV)/constraints.txt)
	$(PIP_INSTALL) $(if $(CONSTRAINTS),-c $(VENV)/constraints.txt) -e ".[$(EXTRAS)]"
	echo "$(FOR)" >$(READY)

constraints/%.txt:
	@echo "There is no $@: dsv4 supports Python 3.10 to 3.13, and $(PYTHON) is $(MINOR)." >&2
	@echo "CONSTRAINTS= installs the newest versions, PYTHON=python3.12 takes another Python." >&2
	@exit 1

clean:
	rm -rf .venv .venv-newest .venv-docs .venv-dist .venv-vllm .pytest_cache .hypothesis .mypy_cache .ruff_cache dist build
