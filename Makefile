# Tierline: `make run` and `make test` set up everything that they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install run test test-all lint clean

help: ## list the commands
	@grep -hE '^[a-z][a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $(STAMP)

install: $(STAMP) ## create .venv and install Tierline with everything

run: install ## start the gateway, the cache and the engine; prints the address and the first key
	@$(BIN)/tierline up

test: install ## the fast tests, on real parts
	$(BIN)/python -m pytest -m 'not slow and not gpu'

test-all: install ## all tests, the slow ones too
	$(BIN)/python -m pytest -m 'not gpu'

lint: install ## style, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## remove the environment and the caches, keep var/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
