# `make test` and `make demo` do all the set-up. Both can be run again, and are then quick.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
LOCK   := requirements-dev.lock
PIP    := -m pip install --quiet --disable-pip-version-check

.PHONY: help setup lock test test-all lint types imports unit slow demo studies bench house figures docs docs-serve release-check clean verl-setup test-verl test-newest

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## create .venv and install everything into it

$(STAMP): pyproject.toml constraints.txt $(LOCK)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; ok = v in ((3, 11), (3, 12), (3, 13)); \
	  sys.exit(0 if ok else "segcredit is tested on Python 3.11 to 3.13; got %d.%d. Type: make setup PYTHON=python3.11" % v)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): some minutes without output"
	$(BIN)/python $(PIP) --require-hashes --no-deps -r $(LOCK)
	@# torch by version alone: its builds (CPU, CUDA) have different hashes, and come from different places
	$(BIN)/python $(PIP) -c constraints.txt torch
	$(BIN)/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@
	@echo "done; type: source $(VENV)/bin/activate"

UV := .venv-lock/bin/uv

lock: $(UV)  ## pin every package of .venv with its hashes, from pyproject.toml and constraints.txt
	@# torch is left out, and named as never needed, so that no CUDA is pinned
	echo "torch; sys_platform == 'none'" | $(UV) pip compile pyproject.toml requirements-dev.in --extra dev --extra docs \
	  --constraints constraints.txt --overrides - --no-emit-package torch --python-version 3.11 --universal \
	  --generate-hashes --no-annotate --no-header --no-emit-index-url --system-certs --quiet -o $(LOCK) $(UPGRADE)

$(UV):
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python $(PIP) uv==0.13.8

test: $(STAMP) lint  ## format, lint, types, imports and the fast tests: about 3 minutes
	@# the checks run beside the tests: each is one process, which would leave other cores idle
	@$(MAKE) --no-print-directory -j3 types imports unit

test-all: test slow  ## the same and the slow tests: long runs, kills, disk faults, browser

lint: $(STAMP)  ## format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)  ## static types
	$(BIN)/mypy

imports: $(STAMP)  ## which package may import which
	$(BIN)/lint-imports

# Two at a time, each on one thread. Compiled tests are kept where the environment says otherwise, as
# that of many container images does: every worker would compile all of them again, for 10 seconds.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

unit: $(STAMP)  ## the fast tests
	$(PYTEST) -m "not slow"

slow: $(STAMP)  ## the slow tests
	$(PYTEST) -m slow --durations=25

VERL := .venv-verl
VERL_STAMP := $(VERL)/installed

verl-setup: $(VERL_STAMP)  ## .venv-verl: verl wants other versions than we do

$(VERL_STAMP): pyproject.toml constraints-verl.txt
	@test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-verl.txt torch
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-verl.txt \
	  -e '.[verl]' beartype hypothesis pytest pytest-xdist
	@touch $@

test-verl: $(VERL_STAMP)  ## the plugin for verl, whole runs included, on a CPU
	@# two at a time: half of a run is waiting for one process or another to start
	OMP_NUM_THREADS=1 $(VERL)/bin/python -m pytest -n 2 tests/verl

NEWEST := .venv-newest
TESTS  ?= tests/models tests/rollout

test-newest:  ## report on the newest transformers, peft and datasets; exits with 0 unless STRICT=1
	$(PYTHON) tools/newest.py $(NEWEST) $(TESTS) $(if $(filter 1,$(STRICT)),--strict)

demo: $(STAMP)  ## the main job: a tiny vision-language model learns by SAPO, a few minutes
	$(BIN)/segcredit demo

studies: $(STAMP)  ## every table and figure at the smallest scale: that they run, nothing more
	rm -rf studies/smoke
	$(BIN)/segcredit study all --scale smoke --jobs 2 --folder studies/smoke

bench: $(STAMP)  ## how fast are credit and a training step
	$(BIN)/python benchmarks/credit.py
	$(BIN)/python benchmarks/step.py

house: $(STAMP)  ## packages with files, lines and imports, and the files that a training step uses
	@OMP_NUM_THREADS=1 $(BIN)/python tools/house.py

figures: $(STAMP)  ## draw the pictures of the idea and of the results again
	$(BIN)/python -m segcredit_lab.pages.idea
	$(BIN)/python -m segcredit_lab.pages.overview

docs: $(STAMP)  ## build the documentation site into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict

docs-serve: $(STAMP)  ## show the documentation site on this machine while you edit
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs serve --strict

release-check: $(STAMP)  ## build and try the release; PUBLISH=1 also fails on placeholder addresses
	$(BIN)/python tools/release_check.py $(if $(filter 1,$(PUBLISH)),--publish)

clean:  ## remove the environments, caches and the built site
	rm -rf $(VENV) $(VERL) $(NEWEST) .venv-lock site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
