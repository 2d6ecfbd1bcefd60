# Every target works in a bare clone: it creates .venv and installs the locked packages once.
PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
CONSTRAINTS := constraints/cpu.txt
# What builds this package is in the lock as well: pip's isolated builds would take the newest.
BUILD := hatchling editables
EDITABLE := --no-build-isolation -e

.PHONY: help install lock check test test-quick test-oldest test-newest test-torch test-browser test-gpu demo report results bench
help:
	@echo "make demo          train a tiny AIR model and three baselines on the CPU, and compare them"
	@echo "make test          lint, type-check and test"
	@echo "make test-quick    the fast tests only, for while you edit"
	@echo "make check         lint and type-check only"
	@echo "make test-oldest   all tests with the oldest supported packages (constraints/oldest.txt)"
	@echo "make test-newest   all tests with the newest releases (torch excepted), not those of the lock"
	@echo "make test-torch    all tests with the oldest supported torch, or TORCH=2.15.0 (gigabytes of CUDA)"
	@echo "make test-gpu      the tests that need a CUDA device"
	@echo "make test-browser  the tests of the report page, in headless Chromium"
	@echo "make report        run five methods and four ablations at tiny size, then tables and figures"
	@echo "make results       docs/results.md, its figures and the table of the README, from results/"
	@echo "make bench         speed and memory of one layer on the CPU"
	@echo "make lock          pin every package anew: constraints/cpu.txt and constraints/oldest.txt"
	@echo "make install       set up $(VENV) (the others do it by themselves)"

install: $(VENV)/installed

# Stamp files: newer than what they were installed from, so nothing is installed twice.
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "airmoe needs Python 3.11 or newer; '$(PYTHON) --version' says: $$($(PYTHON) --version 2>&1 | head -n 1)" >&2; \
	  echo "Name one that is, for example: make $(or $(MAKECMDGOALS),install) PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c $(CONSTRAINTS) $(BUILD)
	$(PIP) install -q -c $(CONSTRAINTS) $(EDITABLE) '.[dev]'
	@touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) install -q -c $(CONSTRAINTS) $(EDITABLE) '.[bench]'
	@touch $@

$(VENV)/installed-browser: $(VENV)/installed
	$(PIP) install -q -c $(CONSTRAINTS) $(EDITABLE) '.[browser]'
	@touch $@

check: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright

test: check
	$(RUN) -m pytest -n auto $(PYTEST_ARGS)

# Without tests that train, start processes or interpret Triton kernels.
SLOW_TESTS = distributed experiments kernels training test_cli.py test_fuzz.py
test-quick: install
	$(RUN) -m pytest -n auto -m "not slow" $(addprefix --ignore=tests/,$(SLOW_TESTS)) $(PYTEST_ARGS)

test-oldest: $(VENV)-oldest/installed
	$(VENV)-oldest/bin/python -m pytest -n auto $(PYTEST_ARGS)

$(VENV)-oldest/installed: pyproject.toml constraints/oldest.txt
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip --disable-pip-version-check install -q -c constraints/oldest.txt $(BUILD)
	$(VENV)-oldest/bin/python -m pip --disable-pip-version-check install -q \
	  -c constraints/oldest.txt $(EDITABLE) '.[dev]'
	@touch $@

# Tests only: new lint rules and type hints break no user. A fresh environment each time, because the
# newest releases of last week are not the point.
test-newest:
	$(PYTHON) -m venv --clear $(VENV)-newest
	$(VENV)-newest/bin/python -m pip --disable-pip-version-check install -q \
	  -c constraints/torch.txt -e '.[dev]'
	$(VENV)-newest/bin/python -m pytest -n auto $(PYTEST_ARGS)

# Pins every package, transitive ones too, for all extras and Pythons. No hashes: torch is a different
# file in each index (CPU here, CUDA there), and pip wants hashes for all packages or for none.
LOCK = $(VENV)-lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras \
  --no-annotate --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
  $(addprefix --find-links ,$(PIP_FIND_LINKS)) pyproject.toml
lock: constraints/cpu.in constraints/oldest.in constraints/torch.txt
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip --disable-pip-version-check install -q uv
	$(LOCK) -c constraints/torch.txt -c constraints/cpu.in -o constraints/cpu.txt
	$(LOCK) -c constraints/torch.txt -c constraints/oldest.in -o constraints/oldest.txt
	sed -i 's/^\(torch==[^+ ]*\)+[a-z0-9.]*/\1/' constraints/cpu.txt constraints/oldest.txt

# With the Triton version that this torch depends on.
TORCH ?= 2.11.0
test-torch: $(VENV)-torch-$(TORCH)/installed
	$(VENV)-torch-$(TORCH)/bin/python -m pytest -n auto $(PYTEST_ARGS)

$(VENV)-torch-%/installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -q torch==$* 'numpy<2.4' -e '.[dev]'
	@touch $@

# Uses the system's Chromium (Debian: apt install chromium); playwright's own is not downloaded.
test-browser: $(VENV)/installed-browser
	$(RUN) -m pytest -m browser $(PYTEST_ARGS)

demo: install
	@$(RUN) examples/demo.py

# If a suite fails, the report still covers the rest; a signal stops everything.
report: install
	@failed=0; for suite in main ablations; do \
	  $(RUN) -m airmoe suite $$suite tiny --out runs/suites/$$suite || failed=$$?; \
	  [ $$failed -lt 128 ] || exit $$failed; done; \
	$(RUN) -m airmoe report runs/suites --out runs/report && exit $$failed

results: install
	@$(RUN) docs/draw_results.py

bench: $(VENV)/installed-bench
	@$(RUN) -m airmoe bench cpu cpu-swiglu cpu-growth

# Installs nothing if $(PYTHON) already has pytest and a torch that sees a GPU (a GPU image).
test-gpu:
	@if $(PYTHON) -c 'import pytest, torch; assert torch.cuda.is_available()' 2>/dev/null; \
	then python=$(PYTHON); else $(MAKE) --no-print-directory install && python=$(RUN); fi && \
	PYTHONPATH=src $$python -m pytest -m gpu $(PYTEST_ARGS)
