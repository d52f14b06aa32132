# Two commands for a newcomer, on a fresh clone with nothing prepared: `make demo` and `make test`.
#
# They find a Python >= 3.12, make .venv and install into it, with the CUDA extra that fits where there is an NVIDIA driver.
# `PYTHON=/path/to/python` uses that environment as it is instead, and installs nothing.

# The JAX that .venv gets: the lowest of the supported range, on which all published figures were measured.
JAX ?= 0.11.2
# Which tests `make test-newest` runs, on the newest JAX of the range.
NEWEST_TESTS ?= tests
# Worker processes of pytest, where pytest-xdist is installed.
JOBS ?= auto

workers = $(if $(shell $(1) -c 'import xdist; print(1)' 2>/dev/null),-n $(JOBS) --maxprocesses 8 --dist worksteal)
pytest = $(1) -m pytest $(workers)

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

ifdef PYTHON
    INSTALLED :=
    INSTALLED_NEWEST :=
    RUN = $(PYTHON)
    RUN_NEWEST = $(PYTHON)
else
    INSTALLED := .venv/installed
    INSTALLED_NEWEST := .venv-newest/installed
    RUN = .venv/bin/python
    RUN_NEWEST = .venv-newest/bin/python
endif

.PHONY: help demo test slow gpu-test gpu-bench test-newest lint format clean check-python
.DEFAULT_GOAL := help

help:
	@echo 'make demo         train a small hybrid language model on real text through a planned arena (3 minutes on 2 cores)'
	@echo 'make test         the quick tests, on JAX $(JAX)'
	@echo 'make slow         the slow tests'
	@echo 'make gpu-test     the tests that need an NVIDIA GPU'
	@echo 'make gpu-bench    the benchmarks on an NVIDIA GPU: benchmarks/results/*.json and RESULTS.md'
	@echo 'make test-newest  the quick tests, on the newest JAX that is supported'
	@echo 'make lint         ruff and mypy'
	@echo 'make format       let ruff sort imports and fix what it can'
	@echo 'make clean        remove environments and caches'
	@echo 'With PYTHON=/path/to/python a target uses that environment as it is, and installs nothing.'

demo: $(INSTALLED) check-python
	$(RUN) examples/train_text.py $(ARGS)

test: $(INSTALLED) check-python
	$(call pytest,$(RUN)) -m 'not slow and not gpu' $(ARGS)

slow: $(INSTALLED) check-python
	XLA_FLAGS= $(call pytest,$(RUN)) -m 'slow and not gpu' $(ARGS)

# One process: workers would each take the GPU's memory. pytest-benchmark, where an environment has it, warns, which is an error here.
gpu-test: $(INSTALLED) check-python
	JAX_PLATFORMS=cuda,cpu $(RUN) -m pytest -p no:benchmark -m gpu $(ARGS)

gpu-bench: $(INSTALLED) check-python
	for suite in step storage project; do JAX_PLATFORMS=cuda,cpu $(RUN) benchmarks/$$suite.py || exit; done
	$(RUN) benchmarks/results.py

test-newest: $(INSTALLED_NEWEST) check-python
	$(call pytest,$(RUN_NEWEST)) -m 'not slow and not gpu' $(NEWEST_TESTS) $(ARGS)

lint: $(INSTALLED) check-python
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: $(INSTALLED) check-python
	$(RUN) -m ruff check --fix .

clean:
	rm -rf .venv .venv-newest .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# A given PYTHON is checked for its version; one that was found has been checked before.
check-python:
	@$(if $(PYTHON),PYTHON='$(PYTHON)' tools/find_python.sh >/dev/null,:)

# The stamps are younger than what they were made from, so a second run installs nothing. This one holds the JAX that was asked
# for, so that another JAX=... installs again, as does an environment whose Python is gone.
ifneq ($(JAX),$(shell .venv/bin/python -c '' 2>/dev/null && cat .venv/installed 2>/dev/null))
.PHONY: .venv/installed
endif

.venv/installed: pyproject.toml tools/make_venv.sh tools/cuda_extra.sh
	tools/make_venv.sh .venv
	@echo 'installing what .venv needs (pip, a few minutes the first time)'
	extra=$$(tools/cuda_extra.sh) && .venv/bin/python -m pip install -qq --editable ".[test,lint$${extra:+,$$extra}]" 'jax==$(JAX)'
	@echo '$(JAX)' > $@

.venv-newest/installed: pyproject.toml tools/make_venv.sh
	tools/make_venv.sh .venv-newest
	@echo 'installing what .venv-newest needs (pip, a few minutes the first time)'
	.venv-newest/bin/python -m pip install -qq --upgrade --editable '.[test]' 'jax>=0.12'
	@touch $@
