# Tierline: `make run` and `make test` set up everything that they need, and do nothing twice.
#
#   make run ARGS="--config my.yaml"      options of `tierline up`
#   make test ARGS="-k supervisor"        options of pytest
#   make install PYTHON=python3.12        another Python than the first fitting one

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# The Python of the machine with the GPU.
GPU_PYTHON ?= 3.12
# The first Python on the path that Tierline supports.
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$name && break; done)

# Where the shell forbids bytecode files, every process of a test would compile Tierline again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install run doctor test test-all lint format bench-gateway bench-streams bench-engine bench-cache \
	bench-embedding bench-cache-store bench-limits bench-routing bench-cascade bench-sessions bench-placement bench-disaggregated chaos kernels-report gpu-check gpu-site clean

help: ## list the commands
	@grep -hE '^[a-z][a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

# An environment that lost its Python or its pip, for example by an interrupted set-up, is made again. `tierline models
# pull` wants a pip that can report without downloading. pip shows its progress on a terminal only. One set-up at a time: a second one waits and finds it done.
define set_up
	@test -n "$(PYTHON)" || { echo "Tierline needs Python 3.11, 3.12 or 3.13: make $@ PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import fcntl, subprocess, sys; lock = open(".setup.lock", "w"); fcntl.flock(lock, fcntl.LOCK_EX); \
		sys.exit(subprocess.call(["/bin/sh", "-ec", sys.argv[1]]))' ' \
	test $@ -nt pyproject.toml && exit 0; \
	$(BIN)/python -c "import pip" 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "cannot create $(VENV): on Debian and Ubuntu, install python3-venv" >&2; exit 1; }; \
	echo "installing Tierline$(2) into $(VENV); a first time downloads about 1 GB (more with a CUDA build of torch), some minutes"; \
	quiet=--quiet; if test -t 1; then quiet=; fi; \
	$(BIN)/python -m pip install $$quiet --disable-pip-version-check "pip>=24" --editable ".[$(1)]"; \
	touch $(3) $@'
endef

# A stamp says that the installation came to its end, with this pyproject.toml.
$(VENV)/.installed-run: pyproject.toml
	$(call set_up,all)

$(VENV)/.installed-dev: pyproject.toml
	$(call set_up,dev, and its development tools,$(VENV)/.installed-run)

install: $(VENV)/.installed-dev ## create .venv and install Tierline with everything

run: $(VENV)/.installed-run ## start the gateway, the cache and the engine; prints the address and the first key
	@exec $(BIN)/tierline up $(ARGS)

doctor: $(VENV)/.installed-run ## check this machine and the configuration
	@$(BIN)/tierline doctor $(ARGS)

test: install ## the fast tests, on real parts; needs nothing running
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow and not gpu' $(ARGS)

test-all: install ## all tests, the slow ones too
	$(BIN)/python -m pytest -m 'not gpu' $(ARGS)

lint: install ## style, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## put the code into the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-gateway: install ## what the gateway adds; with ARGS="--peers litellm,portkey,tensorzero,nginx" others beside it
	$(BIN)/python -m bench.gateway $(ARGS)

bench-streams: install ## thousands of streams on one worker: memory, CPU, lost events; ARGS="--soak 30" for minutes of it
	$(BIN)/python -m bench.streams $(ARGS)

bench-engine: install ## tokens/s of the engine over HTTP beside transformers; with ARGS="--peers llamacpp,vllm" other engines, too
	$(BIN)/python -m bench.engine $(ARGS)

bench-cache: install ## hit rate and false-hit rate of the semantic cache
	$(BIN)/python -m bench.cache $(ARGS)

bench-embedding: install ## what a vector costs on each backend and what it does to decisions; look-ups; other traffic
	$(BIN)/python -m bench.embedding $(ARGS)

bench-cache-store: install ## the cache's file with a million answers: opening, look-ups, searches, memory; takes minutes
	$(BIN)/python -m bench.cache_store $(ARGS)

bench-limits: install ## what limits in Redis cost: latency, CPU here and in Redis, with limits in memory beside them
	$(BIN)/python -m bench.limits $(ARGS)

bench-routing: install ## quality of task and tier decisions, with a keyword heuristic beside it
	$(BIN)/python -m bench.routing $(ARGS)

bench-forecast: install ## what `policy simulate` says of a change of policies, and what then happens
	$(BIN)/python -m bench.forecast $(ARGS)

bench-sessions: install ## what conversations cost that stay on their tier, beside turns that are decided alone
	$(BIN)/python -m bench.sessions $(ARGS)

bench-placement: install ## the choice of replicas; with ARGS="--trace FILE" a trace over simulated ones, else two real engines
	$(BIN)/python -m bench.placement $(or $(ARGS),--engines)

bench-disaggregated: install ## long prompts among running answers: one engine that cuts them up, and two that share the work
	$(BIN)/python -m bench.disaggregated $(ARGS)

bench-cascade: install ## cascades against fixed tiers on public answers; what a curve makes of log-probabilities; needs --data
	$(BIN)/python -m bench.cascade $(ARGS)

chaos: install ## inject faults behind a real gateway: whole answers, or explicit errors, and right rows
	$(BIN)/python -m bench.chaos $(ARGS)

kernels-report: install ## compile every Triton kernel for sm_80 and sm_90 and print its resources
	$(BIN)/python -m bench.kernels_report $(ARGS)

gpu-check: ## kernels, recorded steps and speed on an NVIDIA GPU, in 8 minutes, without network; ARGS="--dry-run" on a CPU
	$(if $(wildcard $(BIN)/python),$(BIN)/python,PYTHONPATH=var/gpu-site python3) -m bench.gpu $(ARGS)

gpu-site: ## what a machine with PyTorch and Triton still lacks for gpu-check, 3 MB in var/gpu-site, to be carried there
	$(or $(wildcard $(BIN)/python),python3) -m pip install --quiet --no-deps --only-binary=:all: --upgrade --target var/gpu-site \
		--platform manylinux2014_x86_64 --python-version $(GPU_PYTHON) 'gguf>=0.17,<1' 'msgspec>=0.20,<1'

clean: ## remove the environment and the caches, keep var/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
