# make serve, make test: each does all of its set-up itself. PYTHON=python3.12 chooses the interpreter, ARGS="server.port=8001" goes to serve,
# WORKERS=4 runs the tests in four processes.
PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell pwd | cksum | cut -d' ' -f1)
DEV_STAMP := $(STAMP)-dev
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS)
NEEDED_MIB := 4096
TOOLS := .venv-tools
TOOLS_PINS := cyclonedx-bom==7.5.0 pip-audit==2.10.1 uv==0.13.9
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install install-dev serve test test-all prove validate-k8s lint lock sbom scan clean

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

install: $(STAMP) ## what serving needs, in the virtual environment .venv; a moment when it is there already
	@echo "install: $(VENV) holds the versions of constraints.txt"

install-dev: $(DEV_STAMP) ## besides, what the tests and lint need

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "install: $(PYTHON) not found: install Python 3.11 or newer, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "install: $$($(PYTHON) -V) is too old: install Python 3.11 or newer, then make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@free=$$(df -Pm . | awk 'NR == 2 { print $$4 }'); [ -d $(VENV)/lib ] || [ "$$free" -ge $(NEEDED_MIB) ] \
	  || { echo "install: $$free MiB free in $$PWD, $(NEEDED_MIB) needed: free some space" >&2; exit 1; }
	@echo "install: creating $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV) || { echo "install: venv failed: on Debian and Ubuntu, apt-get install python3-venv" >&2; exit 1; }
	@echo "install: installing the versions of constraints.txt (a minute or more the first time)"
	@$(PIP) -c constraints.txt pip setuptools
	@$(PIP) -c constraints.txt --no-build-isolation -e .
	@echo "install: compiling, half a minute"
	@$(BIN)/python -m outrider.cluster.cli.launch.compile_ahead
	@touch $@
	@echo "install: $$(du -sm $(VENV) | cut -f1) MiB in $(VENV)"

$(DEV_STAMP): $(STAMP)
	@echo "install: what the tests need"
	@$(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
	@echo "install: $$(du -sm $(VENV) | cut -f1) MiB in $(VENV)"

serve: install ## SmolLM2-135M-Instruct at http://127.0.0.1:8000 until Ctrl-C
	@exec $(BIN)/outrider serve $(ARGS)

lint: install-dev ## ruff and mypy
	@echo "lint: ruff check"
	@$(BIN)/python -m ruff check .
	@echo "lint: mypy"
	@$(BIN)/python -m mypy

test: lint ## lint, then the tests that this machine can run, but for the slow ones
	@echo "test: pytest"
	@$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

test-all: lint ## lint, then every test that this machine can run
	@echo "test-all: pytest"
	@$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

prove: install-dev ## the long proofs (marker proof), hours; their record goes to experiments/results
	@$(BIN)/python -m pytest -n 0 --proof experiments/results $(ARGS)

validate-k8s: install-dev ## every check of the Kubernetes manifests, without a cluster
	@$(BIN)/python -m pytest -v tests/k8s $(ARGS)

lock: ## a fresh resolution of pyproject.toml into constraints.txt
	@rm -rf .venv-lock
	@$(PYTHON) -m venv .venv-lock
	@echo "lock: resolving pyproject.toml"
	@.venv-lock/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --upgrade pip 'setuptools>=77' $(if $(TORCH),torch==$(TORCH))
	@.venv-lock/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --no-build-isolation -e '.[dev]'
	@{ sed -n '/^#/p' constraints.txt; .venv-lock/bin/python -m pip freeze --all --exclude-editable | sed 's/+cpu$$//; s/+cu[0-9]*$$//' | sort -f; } > constraints.new
	@mv constraints.new constraints.txt
	@rm -rf .venv-lock
	@$(MAKE) --no-print-directory constraints-hashed.txt constraints-cuda-hashed.txt
	@echo "lock: constraints.txt and the lists with hashes rewritten; make test checks them"

HASHED := $(TOOLS)/bin/uv pip compile -q --generate-hashes --no-annotate --no-header --no-config --native-tls
# Without torch, whose CPU build is on an index of PyTorch's own.
constraints-hashed.txt: constraints.txt | $(TOOLS)/.installed
	@{ sed -n '/^#/p' $@; grep -v -e '^#' -e '^torch==' constraints.txt | $(HASHED) --no-deps -p $(PYTHON) -; } > constraints.new
	@mv constraints.new $@

# PyPI's torch, which is built for CUDA, what it and the extras for GPUs require, and flash-attn, whose requirements are not asked: it
# says them only where torch is installed.
constraints-cuda-hashed.txt: constraints.txt pyproject.toml | $(TOOLS)/.installed
	@{ sed -n '/^#/p' $@; { grep '^torch==' constraints.txt; $(PYTHON) -c 'import tomllib; \
	  extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*extras["gpu"], *extras["nvcc"], sep="\n")'; } \
	  | $(HASHED) -c constraints.txt -p 3.11 --python-platform x86_64-manylinux_2_28 -; \
	  sed -n 's/^ARG FLASH_ATTN=\(flash-attn==.*\)/\1/p' Dockerfile | $(HASHED) --no-deps -p 3.11 -; } > constraints.new
	@mv constraints.new $@

$(TOOLS)/.installed: Makefile
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) $(TOOLS_PINS)
	@touch $@

sbom: install $(TOOLS)/.installed ## sbom.json: what is installed, with licences, as CycloneDX
	@$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o sbom.json $(BIN)/python
	@$(BIN)/python -c 'import json; parts = json.load(open("sbom.json"))["components"]; \
	  print(f"sbom: {len(parts)} packages in sbom.json; their metadata names no licence that is known:", \
	        ", ".join(part["name"] for part in parts if not part.get("licenses")) or "none")'

scan: $(TOOLS)/.installed ## known holes of the versions in constraints.txt, as PyPI knows them
	@if $(TOOLS)/bin/pip-audit -r constraints.txt --no-deps --disable-pip --strict --progress-spinner off > $(TOOLS)/scan.txt 2> $(TOOLS)/scan.log; \
	then echo "scan: no known hole in constraints.txt"; \
	elif [ -s $(TOOLS)/scan.txt ]; then cat $(TOOLS)/scan.txt; exit 1; \
	else echo "scan: nothing was checked, PyPI does not tell of known holes from here: $$(tail -n 1 $(TOOLS)/scan.log | cut -c 1-240)" >&2; exit 1; fi

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-lock $(TOOLS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
