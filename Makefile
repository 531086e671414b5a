# You need git, make and Python 3.11 or later. Everything else is installed into .venv on first use, in the versions
# listed in constraints.txt.
#
#   PYTHON   the Python that creates .venv           (default: the first 3.11 or later on the PATH)
#   TORCH    the torch to install, as a pip argument (default: the version the project is developed against)
#   WORKERS  options that run pytest in parallel     (WORKERS= runs one process, for a debugger)
#   ARGS     further arguments of pytest             (make test ARGS="tests/layout -x")

TORCH ?= torch==2.13.0
ARGS ?=
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder --durations 25

VENV := .venv
STAMPS := $(VENV)/.stamps
PIP := $(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

# $(call step,COMMAND): run it; if it fails, print the command that failed and the make target to run again.
step = { $(1); } || { code=$$?; printf '\nfailed: %s\nto run it again: make %s\n' \
  "$(subst ",\",$(1))" "$(or $(MAKECMDGOALS),help)$(2)" >&2; exit $$code; }

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-full lint docs bench clean clean-all

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(STAMPS)/test ## train on 4 local ranks, get killed, resume on 2 under another layout; shard, redistribute, train
	@$(call step,OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(VENV)/bin/python examples/05_save_and_reshard.py)
	@$(call step,OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR \
	  $(VENV)/bin/torchrun --standalone --nproc-per-node 4 examples/demo.py)

test: $(STAMPS)/test ## run the tests and the examples of the documentation (ARGS="..." goes to pytest)
	@$(call step,$(VENV)/bin/pytest $(WORKERS) $(ARGS), (only the tests that failed: make test ARGS=--last-failed))

test-full: $(STAMPS)/test ## run the same tests with larger budgets: the long proofs
	@$(call step,SHARDWRIGHT_BUDGET=full $(VENV)/bin/pytest $(WORKERS) $(ARGS))

lint: $(STAMPS)/lint ## run ruff and mypy --strict
	@$(call step,$(VENV)/bin/ruff check)
	@$(call step,$(VENV)/bin/ruff format --check)
	@$(call step,$(VENV)/bin/mypy --strict src)

docs: $(STAMPS)/docs ## build the documentation into site/
	@$(call step,NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet)
	@echo "the documentation is in site/index.html"

bench: $(STAMPS)/test ## run every benchmark, one after another
	@for script in benchmarks/*.py; do echo "== $$script"; $(call step,$(VENV)/bin/python "$$script"); done

clean: ## remove build products and caches
	rm -rf site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## remove .venv as well
	rm -rf $(VENV)

# A stamp is written only after its step has succeeded, so an interrupted step runs again.

$(STAMPS)/venv:
	@if ! $(VENV)/bin/python -c '$(NEW_ENOUGH)' 2>/dev/null || ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
	  found=; for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python3.14); do \
	    if "$$python" -c '$(NEW_ENOUGH)' 2>/dev/null; then found="$$python"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "no Python 3.11 or later with the venv module found; name one: make PYTHON=/path/to/python" >&2; exit 1; \
	  fi; \
	  echo "creating $(VENV) with $$found"; \
	  $(call step,"$$found" -m venv --clear $(VENV)); \
	fi
	@mkdir -p $(STAMPS) && touch $@

# The stamp records the requirement, so that a different TORCH is installed anew.
ifneq ($(shell cat $(STAMPS)/torch 2>/dev/null),$(TORCH))
.PHONY: $(STAMPS)/torch
endif
$(STAMPS)/torch: $(STAMPS)/venv
	@echo "installing $(TORCH) (once; it is large)"
	@$(call step,$(PIP) '$(TORCH)')
	@echo '$(TORCH)' > $@

# The build backend comes first, pinned like the rest, so that the build needs no environment of its own.
$(STAMPS)/test: $(STAMPS)/torch pyproject.toml constraints.txt
	@echo "installing shardwright and the requirements of its tests"
	@$(call step,$(PIP) hatchling editables)
	@$(call step,$(PIP) --no-build-isolation --editable '.[test]')
	@touch $@

$(STAMPS)/lint $(STAMPS)/docs: $(STAMPS)/%: $(STAMPS)/test
	@echo "installing the requirements of \`make $*\`"
	@$(call step,$(PIP) --no-build-isolation --editable '.[$*]')
	@touch $@
