# Everything that is done with this repository. `make help` lists it. Each set-up is done once; a second call is instant.

PYTHON ?= python3.11
VENV ?= .venv
MODEL ?= smollm2
# The torch build: the version of constraints.txt from the default index, unless told otherwise. See README.md.
TORCH ?= $(shell grep '^torch==' constraints.txt)
TORCH_INDEX ?=

BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint $(VENV)/constraints.txt
MODELS := smollm2 gemma3-270m

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-engine setup-frontend kernels models embedded-model demo serve test test-fast lint protos protos-check \
	breaking-check docs docs-check bench flame-graphs clean

help: ## Show this list.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

$(VENV)/constraints.txt: constraints.txt
	@$(BIN)/python -c '' 2> /dev/null || $(PYTHON) -m venv $(VENV)
	@grep -v '^torch==' constraints.txt > $@

$(VENV)/.torch: $(VENV)/constraints.txt
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

$(VENV)/.setup: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[engine,frontend,client,dev]'
	@touch $@

$(VENV)/.setup-engine: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[engine]'
	@touch $@

$(VENV)/.setup-frontend: $(VENV)/constraints.txt pyproject.toml
	$(INSTALL) --editable '.[frontend]'
	@touch $@

setup: $(VENV)/.setup ## Install everything into .venv: torch first, then the services, client and tools.

setup-engine: $(VENV)/.setup-engine ## Install what an engine needs, and no more; the image does this.

setup-frontend: $(VENV)/.setup-frontend ## Install what a frontend needs, without torch; the image does this.

kernels: setup-engine ## Compile the native kernels for every processor of this architecture; the image does this.
	$(BIN)/python -m engine_svc.kernels --all

models: setup ## Fetch and convert the embedded models that the tests use.
	@set -e; for model in $(MODELS); do $(BIN)/takt model pull $$model; done

embedded-model: setup-engine ## Fetch and convert the embedded model with an engine's installation; the image does this.
	$(BIN)/python -m engine_svc.model pull smollm2

demo: setup ## Fetch the embedded model, start an engine and a frontend, ask a question, stop.
	$(BIN)/takt model pull smollm2
	$(BIN)/takt demo smollm2

serve: setup ## Serve MODEL (default smollm2) on this machine until interrupted.
	$(BIN)/takt serve $(MODEL)

test: models ## Run all tests.
	$(BIN)/pytest

test-fast: setup ## Run the tests that need no model.
	$(BIN)/pytest -m 'not model'

lint: setup protos-check breaking-check docs-check ## Check style, types, protos and generated files.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/buf lint protos

protos: setup ## Generate the Python code of the protos.
	$(BIN)/python protos/generate.py

protos-check: setup ## Fail when the generated code is out of date.
	$(BIN)/python protos/generate.py --check

breaking-check: setup ## Fail when the protos break those of the main branch.
	BUF=$(BIN)/buf protos/check_breaking.sh

docs: setup ## Generate docs/configuration.md and the tree in README.md from the code.
	$(BIN)/python docs/generate.py

docs-check: setup ## Fail when what make docs generates is out of date.
	$(BIN)/python docs/generate.py --check

bench: models ## Measure the stack, the control plane and the kernels; ARGS=--peers adds the peers.
	$(BIN)/python bench/run.py $(ARGS)

flame-graphs: models ## Write flame graphs of an engine and a frontend under load.
	$(BIN)/python bench/flame_graphs.py $(ARGS)

clean: ## Remove the virtual environment and caches; fetched models stay.
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
