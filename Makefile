# Every target does its own set-up: a fresh machine needs only `make` and a network.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
RUN    := $(BIN)/python -m

.DEFAULT_GOAL := help
TORCH  := .venv-torch
LOWEST := .venv-lowest
PRISM  := github.com/apache/beam/sdks/v2/go/cmd/prism@v2.77.0

.PHONY: help setup demo test test-unit test-torch test-lowest check format docs bench soak prism clean

help:  ## Show this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml
	@infra/setup.sh "$(VENV)" "$(PYTHON)"
	@touch $@

setup: $(STAMP)  ## Make the virtual environment with everything the other targets need

demo: $(STAMP)  ## The whole product in one command: server, four workers (one is killed), compact, query, replay, export
	@$(BIN)/trajlake demo

test: $(STAMP)  ## All tests, against the local store and a real S3 server
	$(RUN) pytest -m "not soak" -n 2 --dist load || { \
		echo "What failed is run once more, alone and in order: a busy machine is no defect."; \
		$(RUN) pytest -m "not soak" --last-failed --last-failed-no-failures none; }

test-unit: $(STAMP)  ## The tests that take seconds
	$(RUN) pytest -m unit -n 2

test-torch: $(TORCH)/.ready  ## The tests that need PyTorch, in an environment of their own
	$(TORCH)/bin/python -m pytest -m torch

$(TORCH)/.ready: pyproject.toml
	@infra/setup.sh "$(TORCH)" "$(PYTHON)" test-torch
	@touch $@

# Generated pages and image tags are those of the newest versions.
test-lowest: $(LOWEST)/.ready  ## The tests that take seconds, with the oldest versions that pyproject.toml allows
	$(LOWEST)/bin/python -m pytest -m unit -n 2 -k "not reference_page and not images_of_beam"

$(LOWEST)/.ready: pyproject.toml
	@$(PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/pip install --quiet uv
	@VIRTUAL_ENV=$(LOWEST) $(LOWEST)/bin/uv pip install --quiet --resolution lowest-direct -e ".[test]"
	@touch $@

check: $(STAMP)  ## Lint, types, import direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@test ! -e platform/__init__.py || { echo "platform/__init__.py hides the standard library's platform: remove it"; exit 1; }

format: $(STAMP)  ## Let ruff put the code in shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## Write the reference pages that are generated (docs/schema.md, docs/cli.md)
	$(BIN)/trajlake schema show --output markdown > docs/schema.md
	$(BIN)/python -m trajlake_cli.reference > docs/cli.md

bench: $(STAMP)  ## Measure beside peers, print ratios
	$(RUN) tests.benchmarks

soak: $(STAMP)  ## Long tests of reliability
	$(RUN) pytest -m soak

prism: $(STAMP)  ## Build Beam's Prism runner beside python (needs Go), for --runner prism and its tests
	@command -v go >/dev/null || { echo "Go is needed: https://go.dev/dl" >&2; exit 1; }
	GOBIN="$(abspath $(BIN))" go install $(PRISM)

clean:  ## Remove what the targets made
	rm -rf $(VENV) $(TORCH) $(LOWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
