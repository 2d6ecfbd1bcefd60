# Every target works from a bare clone: it makes .venv and installs what it needs, once.
PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
CONSTRAINTS := constraints/cpu.txt

.PHONY: help install check test test-oldest test-torch test-browser test-gpu demo report bench
help:
	@echo "make demo      train a tiny AIR model and its twins at equal budget, and compare them"
	@echo "make report    five methods and four ablations at tiny size, then tables and figures"
	@echo "make test      lint, type-check and test"
	@echo "make check     lint and type-check only"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make test-oldest  the tests of swapped models with the oldest transformers supported"
	@echo "make test-torch  all tests with the oldest torch supported, or TORCH=2.15.0 (gigabytes of CUDA)"
	@echo "make test-browser  those of the report's page, in a headless Chromium"
	@echo "make bench     speed and memory beside the paper's listing and PEER-pytorch, on the CPU"
	@echo "make install   set up $(VENV) (all of the above do it by themselves)"

install: $(VENV)/installed

# The stamps: newer than what they were installed from, so nothing installs twice.
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "airmoe needs Python 3.11 or newer; '$(PYTHON) --version' says: $$($(PYTHON) --version 2>&1 | head -n 1)" >&2; \
	  echo "Name one that is, for example: make $(or $(MAKECMDGOALS),install) PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[bench]'
	@touch $@

$(VENV)/installed-browser: $(VENV)/installed
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[browser]'
	@touch $@

check: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright

test: check
	$(RUN) -m pytest -n auto $(PYTEST_ARGS)

# Everything else runs with the newest transformers that installs.
test-oldest: $(VENV)-oldest/installed
	$(VENV)-oldest/bin/python -m pytest -n auto tests/moe tests/docs/test_drop_in.py $(PYTEST_ARGS)

$(VENV)-oldest/installed: pyproject.toml $(CONSTRAINTS) constraints/oldest.txt
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip --disable-pip-version-check install -q -c $(CONSTRAINTS) \
	  -c constraints/oldest.txt -e '.[dev]'
	@touch $@

# With the Triton that this torch brings.
TORCH ?= 2.11.0
test-torch: $(VENV)-torch-$(TORCH)/installed
	$(VENV)-torch-$(TORCH)/bin/python -m pytest -n auto $(PYTEST_ARGS)

$(VENV)-torch-%/installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -q torch==$* 'numpy<2.4' -e '.[dev]'
	@touch $@

# Needs a Chromium of the system (Debian: apt install chromium); playwright's own is not fetched.
test-browser: $(VENV)/installed-browser
	$(RUN) -m pytest -m browser $(PYTEST_ARGS)

demo: install
	@$(RUN) examples/demo.py

# A run that fails does not keep the rest from its report; a signal does.
report: install
	@failed=0; for suite in main ablations; do \
	  $(RUN) -m airmoe suite $$suite tiny --out runs/suites/$$suite || failed=$$?; \
	  [ $$failed -lt 128 ] || exit $$failed; done; \
	$(RUN) -m airmoe report runs/suites --out runs/report && exit $$failed

bench: $(VENV)/installed-bench
	@$(RUN) -m benchmarks.cpu

# With $(PYTHON) itself where it already has pytest and a torch that sees a GPU (a GPU image): no install.
test-gpu:
	@if $(PYTHON) -c 'import pytest, torch; assert torch.cuda.is_available()' 2>/dev/null; \
	then python=$(PYTHON); else $(MAKE) --no-print-directory install && python=$(RUN); fi && \
	PYTHONPATH=src $$python -m pytest -m gpu $(PYTEST_ARGS)
