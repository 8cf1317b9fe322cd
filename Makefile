# Everything a person runs. `make` alone lists it.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first that runs: a name may stand for a version manager's stub of a version that is not installed.
PYTHON ?= $(shell for name in python3.11 python3.12 python3; do $$name -c 'import venv, ensurepip' 2>/dev/null && echo $$name && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RANKS ?= 2
SERVE_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Files of tests that run at once; 0: one after the other, in one process.
TEST_PROCESSES ?= 0
BENCH ?= kernels
BENCH_ARGS ?=
RESULTS ?=
STEPS ?=
OVERLAY ?= gpu
KUBECTL := $(BIN)/kubectl

.PHONY: help
help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch first and by its exact version: anything else might pull another build as a dependency.
$(INSTALLED): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo 'No Python with venv was found; install python3-venv or pass PYTHON=...' >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; pass PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.PHONY: setup
setup: $(INSTALLED) ## Make .venv with everything in it

.PHONY: demo
demo: setup ## Train an adapter, serve it with 2 ranks beside another one, compare every answer with PEFT's
	$(BIN)/python examples/demo/demo.py $(DEMO_ARGS)

.PHONY: serve
serve: setup ## Serve a checkpoint: make serve MODEL=path [RANKS=2] [SERVE_ARGS="--adapter name=path"]
	@test -n "$(MODEL)" || { echo 'Which model? make serve MODEL=path/of/checkpoint [RANKS=2]' >&2; exit 2; }
	$(BIN)/epilora serve --model "$(MODEL)" --ranks $(RANKS) $(SERVE_ARGS)

.PHONY: run
run: setup ## Serve the demo's checkpoint with its committed adapter, named poet
	$(BIN)/epilora serve --model examples/demo/checkpoint --ranks $(RANKS) --adapter poet=examples/demo/per_expert_adapter

.PHONY: test
test: setup ## Run the tests: make test [PYTEST_ARGS="tests/deploy -k ports"] [TEST_PROCESSES=2 on four cores]
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

.PHONY: soak
soak: setup ## Run the long tests: churn under traffic, killed processes
	$(BIN)/python -m pytest -m soak --timeout 1800 $(PYTEST_ARGS)

.PHONY: check
check: lint types proto-check deploy-check test ## Everything CI checks

.PHONY: lint
lint: setup ## Style of Python files and of the Dockerfile
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile

.PHONY: format
format: setup ## Let ruff put Python files in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: types
types: setup ## Types, strictly
	$(BIN)/mypy
	MYPYPATH=examples/demo $(BIN)/mypy scripts/*.py examples/demo/*.py

.PHONY: protos
protos: setup ## Generate epilora/v1 from protos/
	$(BIN)/python scripts/protos.py

.PHONY: proto-check
proto-check: setup ## Generated code is fresh, protos are well-formed and break no release
	$(BIN)/python scripts/protos.py --check
	$(BIN)/buf lint
	@tag=$$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true); \
	if [ -n "$$tag" ]; then $(BIN)/buf breaking --against ".git#tag=$$tag"; else echo 'buf breaking: no release to compare with yet'; fi

.PHONY: docs
docs: setup ## Write the tables of README.md that come from the settings and the measurements
	$(BIN)/python scripts/readme_tables.py

.PHONY: bench
bench: setup ## Measure on a GPU: make bench [BENCH=kernels|gpu_service] [BENCH_ARGS="--ranks 2 --out FILE"]
	$(BIN)/python -m benchmarks.$(BENCH) $(BENCH_ARGS)

.PHONY: gpu-check
gpu-check: setup ## Everything that needs a GPU: make gpu-check RESULTS=folder [STEPS="tests grid"], see scripts/gpu_check.sh --list
	@test -n "$(RESULTS)" || { echo 'Where to? make gpu-check RESULTS=folder [STEPS="tests grid"]' >&2; exit 2; }
	PYTHON=$(BIN)/python scripts/gpu_check.sh "$(RESULTS)" $(STEPS)

.PHONY: deploy
deploy: setup ## Deploy to the cluster of the current kubectl context: make deploy [OVERLAY=gpu|gpu-8|cpu]
	$(KUBECTL) apply -k deploy/volumes
	$(KUBECTL) apply -k deploy/overlays/$(OVERLAY)

.PHONY: undeploy
undeploy: setup ## Remove what make deploy made; volumes with adapters and the registry stay
	$(KUBECTL) delete --ignore-not-found -k deploy/overlays/$(OVERLAY)

.PHONY: deploy-check
deploy-check: setup ## Render every overlay and validate it strictly, without a cluster
	for overlay in deploy/volumes deploy/overlays/*; do \
	  echo "$$overlay"; \
	  $(KUBECTL) kustomize "$$overlay" | $(BIN)/kubernetes-validate --strict --quiet -; \
	done

.PHONY: clean
clean: ## Remove what was built, the virtual environment included
	rm -rf $(VENV) .demo .run .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info examples/clients/node/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
