# Everything one does here. `make run` and `make test` set up what they need by themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
REQUIREMENTS := requirements/base.txt requirements/dev.txt requirements/engines.txt

.PHONY: setup check test run bench wheel lock

setup: $(READY)

$(READY): $(REQUIREMENTS) pyproject.toml packages.txt tools/system-packages
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] < (3, 14) else "Potluck needs Python 3.11, 3.12 or 3.13; say make PYTHON=python3.11")'
	tools/system-packages packages.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --require-hashes -r requirements/base.txt -r requirements/dev.txt
	$(BIN)/pip install --quiet --require-hashes --no-deps -r requirements/engines.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup
	$(BIN)/pytest

# A pool on this machine, one question, its receipt. ONCE=1: end afterwards.
run: setup
	@$(BIN)/python examples/first_light.py $(if $(ONCE),--once) $(UP)

bench: setup
	tools/system-packages packages-bench.txt
	$(BIN)/python bench/run.py

# What one installs elsewhere: the token path compiled (ADR 0011). Needs a C compiler, Python.h.
wheel: setup
	rm -rf build dist
	POTLUCK_COMPILE=1 $(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# After a change of requirements/*.in. The locks name no registry.
lock:
	cd requirements && for name in base dev; do \
		../$(BIN)/pip-compile --quiet --generate-hashes --no-emit-options --no-header \
			--strip-extras --allow-unsafe --output-file $$name.txt $$name.in; done
