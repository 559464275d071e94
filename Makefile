# Each verb sets up everything it needs: python3.11 (or newer), make and curl are enough, never a compiler.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# What a user may override: `make serve PYTHON=python3.12 VENV=/some/where ARGS="--port 9000"`.
PYTHON ?= $(shell for p in python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV ?= .venv
TORCH_VERSION ?= 2.13.0
# Helm's own engine, for the tests of the chart. It asks for Python 3.12 and works with 3.11 as well.
HELM_VERSION ?= 0.1.32
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=

BIN := $(VENV)/bin
# Wheels only, so that nothing is ever compiled here. Bytecode is: a dozen processes that start together would each make
# their own, and the first start would take twice as long.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --only-binary=:all:
PACKAGES := cluster workers kernels deploy

.PHONY: help serve stop dev install check test test-all test-gpu types bench peers clients deploy-files docs crd-server models dashboard clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: install ## start a cluster on this machine in the background: http://127.0.0.1:8000/v1
	@$(BIN)/paceline serve --detach $(ARGS)

stop: install ## stop what `make serve` started
	@$(BIN)/paceline stop $(ARGS)

dev: $(VENV)/.installed-dev ## set up the environment with the tools for developing

check: dev ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types

test: dev ## the quick tests; no GPU needed
	$(BIN)/pytest -m "not slow and not gpu and not multigpu" $(ARGS)

test-all: dev ## every test; those that need a GPU say so and skip where there is none
	$(BIN)/pytest $(ARGS)

test-gpu: dev ## only the tests that need one or more GPUs
	$(BIN)/pytest -m "gpu or multigpu" $(ARGS)

types: dev ## mypy over the packages under their import names
	@mkdir -p build/types/paceline
	@for d in $(PACKAGES); do ln -sfn ../../../$$d build/types/paceline/$$d; done
	$(BIN)/mypy

bench: install ## measure this machine: a card, one ratio table, one JSON line
	@$(BIN)/paceline bench $(ARGS)

# The one verb that compiles: llama.cpp is built for the processor it is measured on, and vLLM compiles when it starts.
peers: install ## build the Pythons of other engines for `make bench ARGS="--peer all"`; needs g++
	@TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python -m paceline.deploy.bench.peers.environments $(ARGS)

clients: dev ## build the Pythons of other people's clients that slow tests run against a cluster, once
	@TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python tests/client_environments.py $(ARGS)

deploy-files: dev ## write what is made from code again: the schema of the chart, clusters, alerts, dashboard, catalogue of metrics
	$(BIN)/python helm/make_schema.py
	$(BIN)/python -m paceline.deploy.eyes.main
	$(BIN)/paceline cluster-yaml aws --out deploy/cluster.yaml
	$(BIN)/paceline cluster-yaml onprem --host prefill=10.0.0.11 --host decode+draft=10.0.0.12 --out deploy/cluster-onprem.yaml

docs: dev ## build the documentation into build/docs; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

crd-server: ## build the server that the slow tests of the chart ask, once, from Debian's packages; also needs etcd
	tests/deploy/helm/crd_server.sh "$${XDG_CACHE_HOME:-$$HOME/.cache}/paceline/crd-server"

models: install ## train the bundled pair of models again, into deploy/models/bundled
	$(BIN)/python -m paceline.deploy.models.build --out deploy/models/bundled $(ARGS)

dashboard: ## build the dashboard into cluster/admin/static; needs Node 20.19 or newer, which running it does not
	cd dashboard && npm ci --no-audit --no-fund && npm run build

clean: ## remove build outputs and caches; the environment stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find $(PACKAGES) tests -type d -name __pycache__ -prune -exec rm -rf {} +

install: $(VENV)/.installed

# torch comes first and pinned, so that nothing after it picks another build. Without an NVIDIA driver the CPU
# build from PyTorch's own index is enough; where that index cannot be reached, pip takes what it finds by itself.
$(VENV)/.torch:
	@if [ -z "$(PYTHON)" ]; then echo "Paceline needs Python 3.11 or newer: set PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@started=$$SECONDS; \
	echo "setting up $(VENV) with $$($(PYTHON) --version)"; \
	$(PYTHON) -m venv $(VENV); \
	$(PIP) --upgrade pip || echo "going on with the pip that came with Python, which takes twice as long"; \
	if [ -e /proc/driver/nvidia ] || command -v nvidia-smi >/dev/null; then \
		$(PIP) "torch==$(TORCH_VERSION)"; \
	elif curl -fsI --max-time 5 -o /dev/null $(TORCH_INDEX)/torch/ 2>/dev/null; then \
		$(PIP) --no-deps --index-url $(TORCH_INDEX) "torch==$(TORCH_VERSION)"; \
	else \
		echo "cannot reach $(TORCH_INDEX): taking the torch that pip finds by itself"; \
		$(PIP) "torch==$(TORCH_VERSION)"; \
	fi; \
	echo "installed torch $(TORCH_VERSION) in $$((SECONDS - started)) s"
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.torch
	@started=$$SECONDS; PYTHONWARNINGS=ignore $(PIP) --editable .; echo "installed in $$((SECONDS - started)) s"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.installed
	@started=$$SECONDS; PYTHONWARNINGS=ignore $(PIP) --editable '.[dev]'; \
	$(PIP) --no-deps --ignore-requires-python "helm-sdkpy==$(HELM_VERSION)"; echo "installed the developer tools in $$((SECONDS - started)) s"
	@touch $@
