# The task menu. "make" alone prints it.
#
# Everything is installed into .venv, from the pinned files in requirements/. A target installs only what it needs; the
# stamps in .venv/stamps make a repeated run quick.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

# More words for the command behind a target: make test ARGS="-k cpuset"
ARGS ?=
UV ?= uv

VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/stamps

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_CACHE_DIR := 1
export PIP_NO_INPUT := 1

.PHONY: help demo test faults lint bench lock clean packages-demo packages-test FORCE

help: ## this list
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/    \1\t\2/p' Makefile

demo: packages-demo $(STAMPS)/run ## see berth at work on this machine, in half a minute
	@$(BIN)/berth demo $(ARGS)

test: packages-test $(STAMPS)/dev ## run the tests
	@$(BIN)/python -m pytest $(ARGS)

faults: packages-test $(STAMPS)/dev ## run the long fault-injection tests
	@$(BIN)/python -m pytest -m faults --timeout 3600 $(ARGS)

lint: $(STAMPS)/dev ## check style, types and the import rule
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports --no-logo

bench: packages-test $(STAMPS)/run ## run every benchmark in bench/
	@set -e; for bench in bench/*.py; do \
	    if [ -e "$$bench" ]; then echo "== $$bench"; $(BIN)/python "$$bench" $(ARGS); else echo "bench/ is empty"; fi; \
	done

lock: ## pin requirements/*.lock anew (needs uv; ARGS=--upgrade moves to the newest releases)
	@command -v "$(UV)" >/dev/null || { echo "make lock needs uv: pip install uv, or make lock UV=PATH" >&2; exit 1; }
	@set -e; lock() { name=$$1; shift; "$(UV)" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(ARGS) \
	    "$$@" --output-file requirements/$$name.lock requirements/$$name.in; }; \
	lock run; \
	lock build --constraint requirements/run.lock; \
	lock dev --constraint requirements/run.lock --constraint requirements/build.lock

clean: ## remove .venv and everything else that make made
	@rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

packages-demo:
	@scripts/system-packages demo

packages-test:
	@scripts/system-packages test

# A virtual environment outlives neither a move of the checkout nor the removal of its Python. Either one, and it is made
# anew.
VENV_STANDS := $(shell test "$$(cat $(STAMPS)/venv 2>/dev/null)" = "$$(pwd -P)" && $(BIN)/python -c pass 2>/dev/null && echo yes)

$(STAMPS)/venv: scripts/make-venv $(if $(VENV_STANDS),,FORCE)
	@scripts/make-venv $(VENV)
	@mkdir -p $(STAMPS)
	@pwd -P >$@

# Bytecode is written now, so that the first start is as quick as every other.
$(STAMPS)/run: $(STAMPS)/venv requirements/run.lock requirements/build.lock pyproject.toml
	@echo "Installing berth into $(VENV)" >&2
	@scripts/pip install --require-hashes -r requirements/run.lock -r requirements/build.lock
	@scripts/pip install --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q src $$($(BIN)/python -c 'import click, msgspec; print(*click.__path__, *msgspec.__path__)')
	@touch $@

$(STAMPS)/dev: $(STAMPS)/run requirements/dev.lock
	@echo "Installing the tools for tests and checks into $(VENV)" >&2
	@scripts/pip install --require-hashes -r requirements/dev.lock
	@touch $@
