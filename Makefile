# Two commands do everything: `make demo` and `make test`. Both create .venv when it is missing.
# The first of these that runs; or say PYTHON=/path/to/python.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13,$(shell $(p) -c '' 2>/dev/null && echo $(p))))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
BENCH_ARGS ?=
# They make tables: hours to days each, and the same command continues. `gpu` needs a GPU, `speed`
# is `make bench`.
EXPERIMENTS := gpu/gpu speed/speed quality/canary_audits quality/real_tables
# Two processes, each of which takes the next file of tests.
TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo demo-search check test test-slow test-e2e test-all nightly lint audit-zoo matrix bench bench-all docs notebook clean install
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo "make demo    train privately, certify and report on built-in data (under a minute after the install)"
	@echo "make demo-search  the same with a private search of the noise (two minutes)"
	@echo "make check   lint and types, then make test"
	@echo "make test    the quick tests: neither slow ones nor other processes (minutes on two cores)"
	@echo "make test-all  every test but the nightly ones (Ray's jobs, kills, whole commands, generated input)"
	@echo "make lint    ruff, import-linter and mypy"
	@echo "make audit-zoo  what the audits find of planted faults (seconds; docs/how-to/audits.md)"
	@echo "make matrix  other Pythons, other versions of torch (some GB and half an hour)"
	@echo "make mutation  change five modules in small ways: do tests notice? (a quarter of an hour; docs/contributing/testing.md)"
	@echo "make nightly what is beyond test-all: experiments, hosts, faults, mutation (hours; CONTRIBUTING.md)"
	@echo "make bench   the table of speeds beside peers, in benchmarks/results/speed.md (about half an hour, alone)"
	@echo "make bench-all  every other benchmark but the experiments (BENCH_ARGS=--quick: that they run)"
	@echo "make docs    the documentation as a static site, in site/ (a minute; warnings are errors)"
	@echo "make reference  renew the generated part of the pages in docs/reference"
	@echo "make notebook  execute the notebooks of examples/ again"
	@echo "make clean   remove the environment and caches (never runs/)"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tests/s3-requirements.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "install Python 3.11, 3.12 or 3.13, or set PYTHON=/path/to/one"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about 2 GB, a few minutes the first time) ..."
	@rm -rf dpdist.egg-info  # an old one would hide new entry points from what runs here
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@# The S3 server of the tests, in an environment of its own (tests/s3_server.py says why).
	@$(BIN)/python -m venv $(VENV)/moto
	@$(VENV)/moto/bin/python -m pip install --quiet --disable-pip-version-check -r tests/s3-requirements.txt
	@touch $(STAMP)

# Hundreds of processes of the tests import the package: compiled once, also where Python is told to
# write no bytecode.
.PHONY: bytecode
bytecode: install
	@$(BIN)/python -m compileall -q dpdist cluster tuning

demo: install
	@$(BIN)/dpdist run digits --name demo

demo-search: install
	@$(BIN)/dpdist run digits-search --name demo-search

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy

check: lint test

test: bytecode
	@$(TESTS) -m "not slow and not e2e" $(PYTEST_ARGS)

test-slow: bytecode
	@$(TESTS) -m "slow and not e2e" $(PYTEST_ARGS)

test-e2e: bytecode
	@$(TESTS) -m e2e $(PYTEST_ARGS)

test-all: bytecode
	@$(TESTS) $(PYTEST_ARGS)

# Each part is run, whichever failed before it.
nightly: bytecode nightly-tools
	@failed=0; \
	DPDIST_NIGHTLY=1 $(TESTS) -m nightly $(PYTEST_ARGS) || failed=1; \
	DPDIST_HOSTS=1 DPDIST_FAULTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/hosts $(PYTEST_ARGS) || failed=1; \
	$(BIN)/python tests/mutation.py || failed=1; \
	$(BIN)/python tests/matrix.py || failed=1; \
	exit $$failed

audit-zoo: install
	@$(BIN)/python tests/support/zoo.py

.PHONY: mutation nightly-tools
nightly-tools: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,nightly]"

mutation: bytecode nightly-tools
	@$(BIN)/python tests/mutation.py

matrix: install
	@$(BIN)/python tests/matrix.py

.PHONY: bench-tools
bench-tools: install
	@echo "the peers are looked for ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,bench,hf]"

bench: bench-tools
	@$(BIN)/python benchmarks/speed/speed.py $(BENCH_ARGS)

bench-all: bench-tools
	@for script in $(filter-out $(EXPERIMENTS:%=benchmarks/%.py),$(sort $(wildcard benchmarks/*/[a-z]*.py))); do \
		echo "== $$script"; $(BIN)/python $$script $(BENCH_ARGS) || exit 1; done
	@echo "== left out, for hours or a machine of their own: $(EXPERIMENTS:%=%.py)"

.PHONY: docs-tools
docs-tools: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"

docs: install
	@rm -rf site
	@$(BIN)/python -m sphinx -b html -c docs -d build/doctrees -E -q -W --keep-going . site
	@echo site/index.html

.PHONY: reference
reference: install
	@cd docs && ../$(BIN)/python -m tools.reference

notebook: docs-tools
	@$(BIN)/python examples/execute.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .import_linter_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
