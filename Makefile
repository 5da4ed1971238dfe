# Every target installs what it needs; `make` prints this list.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Three for two cores: nearly half of the tests' time is spent waiting for other processes.
WORKERS := $(shell echo $$(($$(nproc) < 4 ? ($$(nproc) * 3 + 1) / 2 : 6)))
SITE := $(BIN)/python -m sphinx --quiet --fail-on-warning --conf-dir docs . docs/_build
# Hundreds of processes import the same files, also where images forbid to keep them compiled.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder

.PHONY: help setup demo serve test test-long check tree proto docs model bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## create .venv and install everything

# A changed kernel is compiled by installing again.
$(STAMP): pyproject.toml constraints.txt $(wildcard engine/native/src/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --progress-bar on --constraint constraints.txt torch
	$(BIN)/pip install --progress-bar on --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP) ## one prompt, two nodes: the main job on this machine, in a minute
	$(BIN)/python -m deploy.demo

serve: $(STAMP) ## keep the demo cluster up and print how to talk to it
	$(BIN)/python -m deploy.demo --keep

test: $(STAMP) ## every promise once: minutes on two cores
	$(PYTEST) --durations 15

test-long: $(STAMP) ## the same promises crossed, repeated and slow
	$(PYTEST) --durations 15 -m long

check: $(STAMP) ## lint, types, architecture, links of documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy engine serving connector prefill_node decode_node proxy deploy benchmarks examples tests
	$(BIN)/lint-imports
	$(SITE)

tree: $(STAMP) ## write docs/TREE.md from docstrings; options.md, cluster-file.md from options
	$(BIN)/python -m tests.tree
	$(BIN)/python -m tests.options_page

docs: $(STAMP) ## the site in docs/_build, from the documents and what servers declare
	$(SITE)
	@echo "docs/_build/docs/index.html"

proto: $(STAMP) ## regenerate serving/rpc/pb from proto/node.proto
	$(BIN)/python -m grpc_tools.protoc -Iserving/rpc/pb=proto --python_out=. --pyi_out=. \
		--grpc_python_out=. proto/node.proto

model: $(STAMP) ## train the small model that the demo serves, half an hour
	$(BIN)/python -m benchmarks.demo_model.train --out deploy/demo/model

bench: $(STAMP) ## all benchmarks but the soak, an hour on an idle machine; prints the path of its page
	$(BIN)/python -m benchmarks.engine.decode_overhead
	$(BIN)/python -m benchmarks.engine.engine_vs_llama
	$(BIN)/python -m benchmarks.engine.engine_vs_transformers
	$(BIN)/python -m benchmarks.engine.loading
	$(BIN)/python -m benchmarks.hand_over.transfer
	$(BIN)/python -m benchmarks.hand_over
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.serving.pauses
	$(BIN)/python -m benchmarks.serving.proxy_cost
	$(BIN)/python -m benchmarks.serving.proxy_cost.members
	$(BIN)/python -m benchmarks.cache cost
	$(BIN)/python -m benchmarks.cache policies
	$(BIN)/python -m benchmarks.cache layouts
	$(BIN)/python -m benchmarks.cache.routing
	$(BIN)/python -m benchmarks.cache.routing_cost
	$(BIN)/python -m benchmarks.cache.kv_events
	$(BIN)/python -m benchmarks.cache.offload
	$(BIN)/python -m benchmarks.hand_over.breakeven
	$(BIN)/python -m benchmarks.serving.colocated
	$(BIN)/python -m benchmarks.serving.conversation
	$(BIN)/python -m benchmarks.serving.replay
	$(BIN)/python -m benchmarks.support.report_page

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
