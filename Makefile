# Every chore by name. People and CI use the same targets.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 8080
PYTEST_ARGS ?=
# Tests at a time, 0 for one process. Most of them compute with one thread.
WORKERS ?= 2
# By files, whose tests share servers, and in their order: the few long tests of some files would come last otherwise.
IN_PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
EVAL_ARGS ?=
PEER ?=

# The stamps carry a checksum of pyproject.toml, so that only a change of it installs again: times of files say
# nothing after a checkout.
KEY := $(shell cksum < pyproject.toml | cut -d ' ' -f 1)

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint format acceptance bench fidelity clean

help:
	@echo "make demo       install, start a server on $(HOST):$(PORT) with a small model, and keep it running"
	@echo "make test       install, run the whole test suite; some of it: PYTEST_ARGS='-k words' WORKERS=0"
	@echo "make test-fast  the same without the slow tests"
	@echo "make lint       ruff, mypy, import contracts"
	@echo "make format     let ruff rewrite what it can"
	@echo "make acceptance what a restored slot is worth, as a table (EVAL_ARGS='-n 5')"
	@echo "make bench      five minutes of tokens per second, beside a llama-server with PEER=PATH"
	@echo "make fidelity   whether drafting changes the text, by distribution and word for word"
	@echo "make clean      remove $(VENV) and caches"

demo: $(VENV)/.installed-demo-$(KEY)
	@exec $(BIN)/python scripts/demo.py --host $(HOST) --port $(PORT)

test: $(VENV)/.installed-test-$(KEY)
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "slow or not slow" $(PYTEST_ARGS)

test-fast: $(VENV)/.installed-test-$(KEY)
	$(BIN)/python -m pytest $(IN_PARALLEL) $(PYTEST_ARGS)

lint: $(VENV)/.installed-test-$(KEY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-test-$(KEY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

acceptance: $(VENV)/.installed-eval-$(KEY)
	$(BIN)/python -m eval acceptance $(EVAL_ARGS)

bench: $(VENV)/.installed-eval-$(KEY)
	$(BIN)/python -m eval bench --quick $(if $(PEER),--peer $(PEER)) $(EVAL_ARGS)

fidelity: $(VENV)/.installed-eval-$(KEY)
	$(BIN)/python -m eval fidelity $(EVAL_ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# bin/activate, since venv writes it last: an interrupted run starts over.
$(BIN)/activate:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "Python 3.11 or newer is needed; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%-$(KEY): | $(BIN)/activate
	$(BIN)/python -m pip install --editable '.[$*]'
	@rm -f $(VENV)/.installed-$*-*
	@touch $@
