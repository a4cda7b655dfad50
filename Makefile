# `make demo` and `make test` need only Python (>= 3.10) and make: the first run installs into .venv, later runs are quick.
#   make test PYTEST_ARGS="-k wire -x"     make test FOCUS=kernels/cpu/adam.py     make demo PYTHON=python3.12

PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 2
PYTEST_ARGS ?=
FOCUS ?=
BUDGET ?= 290
DEMO_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=

# Modules are compiled once, not in each of the hundreds of processes of the tests.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.installed
# What each stamp says is installed.
EXTRAS_demo := perf
EXTRAS_installed := test,check,perf,mpi
EXTRAS_release := release
HAS_installed := .venv/.demo

.PHONY: help demo test test-all check types lint format bench fuzz docs dist clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: .venv/.demo  ## train with 1 bit and without, side by side; DEMO_ARGS="--optimizer lamb"
	@mkdir -p build
	@$(BIN)/onebit demo --out build/onebit-demo.png $(DEMO_ARGS)

test: $(STAMP)  ## run the tests that fit in three minutes on two quiet cores; FOCUS=FILE: those for a change of that file
ifdef FOCUS
	@$(BIN)/python -m pytest --focus=$(FOCUS) $(PYTEST_ARGS)
else
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --budget=$(BUDGET) $(PYTEST_ARGS)
endif

test-all: $(STAMP)  ## run all tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

check: types lint  ## lint, formatting, types, layering
	@$(BIN)/python -m pytest -q tests/test_structure.py

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)  ## type-check the three folders, laid out as they install
	@rm -rf build/types && mkdir -p build/types/onebit
	@cd build/types/onebit && ln -s ../../../onebit/* ../../../kernels ../../../collectives .
	@$(BIN)/mypy

format: $(STAMP)  ## format and sort imports
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP)  ## measure kernels and network against the targets; BENCH_ARGS="--only kernels". The network needs Linux
	@$(BIN)/python -m perf.bench $(BENCH_ARGS)

fuzz: $(STAMP)  ## 100,000 cases of random and mutated input: only documented errors; and 1,000 random runs, interrupted; FUZZ_ARGS="--seed 1"
	@$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)
	@$(BIN)/python -m tests.fuzz --only runs --cases 1000 --jobs 1

docs: .venv/.demo .venv/.release  ## build the site of docs/ into build/site; a link that leads nowhere is an error
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "build/site/index.html"

dist: $(STAMP) .venv/.release  ## build what is published into dist/, and run the README's ten lines from it
	@rm -rf dist
	@$(BIN)/python -m build -q --outdir dist
	@$(BIN)/python -m pytest -q tests/test_package.py

clean:  ## remove .venv, caches and build outputs
	rm -rf .venv build dist onebit.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/bin/python:
	@command -v $(PYTHON) >/dev/null || \
	    { echo "error: $(PYTHON) not found. Install Python 3.10 or later, or name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "error: onebit needs Python 3.10 or later. Name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "error: this Python cannot make virtual environments. On Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Making .venv"
	@$(PYTHON) -m venv .venv

# --no-compile: Python compiles the modules that are imported, pip all 14,000, for more than a minute.
# pip's output is shown where it fails; a dot stands for five seconds.
.venv/.%: pyproject.toml constraints.txt | .venv/bin/python
	@printf '%s' "Installing onebit and what it needs here ($(EXTRAS_$*)) into .venv: once, a minute or two on a fast connection "
	@(while sleep 5; do printf .; done) & dots=$$!; trap 'kill $$dots 2>/dev/null' EXIT; trap 'exit 130' INT TERM HUP; \
	$(BIN)/python -m pip --disable-pip-version-check install --no-compile --no-input $(PIP_ARGS) \
	    -c constraints.txt -e '.[$(EXTRAS_$*)]' >.venv/pip.log 2>&1 || { echo; cat .venv/pip.log; exit 1; }
	@echo
	@touch $@ $(HAS_$*)
	@echo "Installed"
