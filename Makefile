# Every target works from a bare clone: it makes .venv and installs what the lock pins, once.
PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
CONSTRAINTS := constraints/cpu.txt

.PHONY: help install lock check test test-oldest test-newest test-torch test-browser test-gpu demo report bench
help:
	@echo "make demo      train a tiny AIR model and its twins at equal budget, and compare them"
	@echo "make report    five methods and four ablations at tiny size, then tables and figures"
	@echo "make test      lint, type-check and test"
	@echo "make check     lint and type-check only"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make test-oldest  all tests with the oldest packages supported (constraints/oldest.txt)"
	@echo "make test-newest  all tests with the newest packages (torch excepted), not those of the lock"
	@echo "make test-torch  all tests with the oldest torch supported, or TORCH=2.15.0 (gigabytes of CUDA)"
	@echo "make test-browser  those of the report's page, in a headless Chromium"
	@echo "make bench     speed and memory beside the paper's listing and PEER-pytorch, on the CPU"
	@echo "make lock      pin every package anew: constraints/cpu.txt and constraints/oldest.txt"
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

test-oldest: $(VENV)-oldest/installed
	$(VENV)-oldest/bin/python -m pytest -n auto $(PYTEST_ARGS)

$(VENV)-oldest/installed: pyproject.toml constraints/oldest.txt
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip --disable-pip-version-check install -q \
	  -c constraints/oldest.txt -e '.[dev]'
	@touch $@

# Not lint and types: new rules of ruff and new type hints in Triton's language break no user.
# Installed anew each time: what was newest last week is not what this is about.
test-newest:
	$(PYTHON) -m venv --clear $(VENV)-newest
	$(VENV)-newest/bin/python -m pip --disable-pip-version-check install -q \
	  -c constraints/torch.txt -e '.[dev]'
	$(VENV)-newest/bin/python -m pytest -n auto $(PYTEST_ARGS)

# Every package, transitive ones too, of all extras and Pythons. Without hashes: torch is another file
# in every index (a CPU build here, one with CUDA there), and pip wants hashes for all or for none.
LOCK = $(VENV)-lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras \
  --no-annotate --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" pyproject.toml
lock: constraints/cpu.in constraints/oldest.in constraints/torch.txt
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip --disable-pip-version-check install -q uv
	$(LOCK) -c constraints/torch.txt -c constraints/cpu.in -o constraints/cpu.txt
	$(LOCK) -c constraints/torch.txt -c constraints/oldest.in -o constraints/oldest.txt
	sed -i 's/^\(torch==[^+ ]*\)+[a-z0-9.]*/\1/' constraints/cpu.txt constraints/oldest.txt

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
