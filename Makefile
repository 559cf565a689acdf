# Two commands do it all on a fresh machine with Python 3.11: `make demo` and `make test`. A third,
# `make test-vllm`, runs a real vLLM on the CPU, from an environment of its own.
# Elsewhere, TORCH_INDEX=https://download.pytorch.org/whl/cpu takes PyTorch's public CPU build
# instead of the (much larger) CUDA one.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
VENV_VLLM := .venv-vllm
READY_VLLM := $(VENV_VLLM)/ready

.PHONY: demo test test-vllm lint protos clean
.DELETE_ON_ERROR:

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt -e '.[engine,dev]'
	touch $@

# 3 is an answer, not a failure: the search found no forward pass that is honestly faster.
demo: $(READY)
	@$(BIN)/trimtab demo $(DEMO_ARGS) || { status=$$?; [ $$status -eq 3 ] || exit $$status; }

# The same with stock vLLM servers in the place of our own engine; about five minutes.
.PHONY: demo-vllm
demo-vllm: $(READY) $(READY_VLLM)
	@$(BIN)/trimtab demo --engine vllm --vllm $(VENV_VLLM)/bin/vllm $(DEMO_ARGS) || \
		{ status=$$?; [ $$status -eq 3 ] || exit $$status; }

test: $(READY)
	$(BIN)/pytest $(PYTEST_ARGS)

$(READY_VLLM): engines/vllm_constraints.txt engines/vllm_cpu_env.py
	TORCH_INDEX=$(TORCH_INDEX) $(PYTHON) -m engines.vllm_cpu_env $(VENV_VLLM)

test-vllm: $(READY) $(READY_VLLM)
	REAL_VLLM_ENV=$(CURDIR)/$(VENV_VLLM) $(BIN)/pytest -m vllm $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

protos: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m protos

clean:
	rm -rf $(VENV) $(VENV_VLLM) *.egg-info .mypy_cache .ruff_cache .pytest_cache
