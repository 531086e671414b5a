# Everything needs only git, make and Python 3.11 or later; the rest is installed into .venv on first use.
#
#   PYTHON   which Python makes .venv                (default: the first 3.11 or later found)
#   TORCH    which torch to install, as pip takes it (default: the one the project is developed against)
#   WORKERS  how pytest shares out the test files    (WORKERS= runs them in one process, for a debugger)
#   ARGS     passed on to pytest                     (make test ARGS="tests/layout -x")

TORCH ?= torch==2.13.0
ARGS ?=
WORKERS ?= -n 2 --dist loadfile --durations 25

VENV := .venv
STAMPS := $(VENV)/.stamps
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-full lint docs bench clean clean-all

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(STAMPS)/test ## the main job in miniature, on 4 local ranks: save, be killed, resume on 2; shard, move, train
	@OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(VENV)/bin/python examples/05_save_and_reshard.py
	@OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(VENV)/bin/torchrun --standalone --nproc-per-node 4 examples/demo.py

test: $(STAMPS)/test ## every test, every documentation example (ARGS="..." goes to pytest)
	@$(VENV)/bin/pytest $(WORKERS) $(ARGS)

test-full: $(STAMPS)/test ## the same tests with larger budgets: the long proofs
	@SHARDWRIGHT_BUDGET=full $(VENV)/bin/pytest $(WORKERS) $(ARGS)

lint: $(STAMPS)/lint ## ruff and mypy --strict
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy --strict src

docs: $(STAMPS)/docs ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "the documentation is in site/index.html"

bench: $(STAMPS)/test ## run every benchmark, one after another
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(VENV)/bin/python "$$script"; done

clean: ## remove what was built, and caches
	rm -rf site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## remove .venv as well
	rm -rf $(VENV)

# A stamp is written only after its step has ended well, so a step that was cut short is done again.

$(STAMPS)/venv:
	@if ! $(VENV)/bin/python -c '$(NEW_ENOUGH)' 2>/dev/null || ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
	  found=; for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python3.14); do \
	    if "$$python" -c '$(NEW_ENOUGH)' 2>/dev/null; then found="$$python"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "no Python 3.11 or later with the venv module found; name one: make PYTHON=/path/to/python" >&2; exit 1; \
	  fi; \
	  echo "making $(VENV) with $$found"; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	@mkdir -p $(STAMPS) && touch $@

# The stamp holds what was asked for, so that another TORCH is another installation.
ifneq ($(shell cat $(STAMPS)/torch 2>/dev/null),$(TORCH))
.PHONY: $(STAMPS)/torch
endif
$(STAMPS)/torch: $(STAMPS)/venv
	@echo "installing $(TORCH) (once; it is large)"
	@$(PIP) '$(TORCH)'
	@echo '$(TORCH)' > $@

$(STAMPS)/test: $(STAMPS)/torch pyproject.toml
	@echo "installing shardwright and what its tests need"
	@$(PIP) --editable '.[test]'
	@touch $@

$(STAMPS)/lint $(STAMPS)/docs: $(STAMPS)/%: $(STAMPS)/test
	@echo "installing what \`make $*\` needs"
	@$(PIP) --editable '.[$*]'
	@touch $@
