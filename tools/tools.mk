# SPDX-License-Identifier: Apache-2.0
# Targets for developers of specops: long tests, tests with other packages, pictures, and wheels.
# Run them by `make -C tools TARGET`. The root Makefile has the rules of the environment and the
# build.
include Makefile

SOAK_SECONDS ?= 1800
CAMPAIGN_MINUTES ?= 30

.PHONY: simt simt-race simt-asan simt-smoke test-race test-asan test-smoke test-arm test-sanitize
.PHONY: llamacpp
.PHONY: campaign soak attacks test-vllm vllm-campaign test-lm-eval test-clients test-dynamo
.PHONY: bench-peers screenshots sdist wheel-suffix wheel-old wheel-arm test-bare

# Build the interpreter of CUDA kernels (docs/simt.md) without running `make test`.
simt: $(VENV)/simt $(VENV)/serve-deps

# Build the interpreter with its race detector, or with AddressSanitizer. test-race and test-asan
# run all op tests in these builds. test-smoke runs the first case of every op test with the race
# detector and the last one with AddressSanitizer. simt-smoke builds both at once, so that all cores
# stay busy.
simt-race: VARIANTS := _simt_race
simt-asan: VARIANTS := _simt_asan
simt-smoke: VARIANTS := _simt_race _simt_asan
simt-race simt-asan simt-smoke: $(VENV)/simt
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/cmake-cpython-* --target $(VARIANTS)

RACE := SPECOPS_SIMT_BUILD=race $(PYTEST) "not slow"
ASAN := SPECOPS_SIMT_BUILD=asan \
  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:halt_on_error=0 $(PYTEST) "not slow"

test-race: simt-race $(VENV)/test-deps
	$(RACE) -k simt

test-asan: simt-asan $(VENV)/test-deps
	$(ASAN) -k simt

# Files with op tests. Collecting the tests of all other files would take longer than running these.
OP_TESTS = $(shell grep -l 'device: str' tests/test_*.py)

test-smoke: simt-smoke $(VENV)/test-deps
	$(RACE) --smoke simt:first $(OP_TESTS)
	$(ASAN) --smoke simt:last $(OP_TESTS)

test-arm: $(VENV)/test-deps
	$(ARM)

# Test the suffix tree without Python, fuzzed and with several threads: under AddressSanitizer with
# UBSan, and under ThreadSanitizer. The target takes minutes; FUZZ_SECONDS sets the time of fuzzing.
test-sanitize: $(VENV)/test-deps
	$(BIN)/python -m pytest -m sanitize tests/test_suffix_programs.py tests/test_threads.py

# Run a full suffix cache under churn: memory stays flat, no call takes long, and nothing breaks.
soak: setup
	$(BIN)/python tests/suffix_soak.py --seconds $(SOAK_SECONDS)

# Compare random engines, with every method, with plain decoding.
campaign: setup
	PYTHONPATH=. $(BIN)/python tests/engine_campaign.py --minutes $(CAMPAIGN_MINUTES)

# Measure the latency of a normal client and the server's memory during attacks, in ten minutes.
attacks: setup
	$(BIN)/python tests/server_attacks.py

# Tests with other packages have their own environments, which also see the packages of .venv.
define BESIDE_THE_TESTS
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	site='import site; print(site.getsitepackages()[0])'; \
	  { $(BIN)/python -c "$$site"; echo "$(abspath python)"; } \
	  > "$$($(@D)/bin/python -c "$$site")/specops.pth"
endef
ITS_PIP = $(@D)/bin/pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS)

# Install vLLM in a separate environment, which takes minutes and gigabytes. The environment uses
# the package from this tree; vLLM finds the plug-in by the package's metadata. The three wheels
# that are removed again are CUDA builds.
VLLM := .venv-vllm
VLLM_RUN := LD_PRELOAD="$(abspath $(VLLM))/lib/libiomp5.so" $(VLLM)/bin/python

$(VLLM)/ready: tests/with_vllm/requirements.txt pyproject.toml $(VENV)/built
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(ITS_PIP) -r tests/with_vllm/requirements.txt
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	echo "$(abspath python)" > "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/specops.pth"
	$(BIN)/python setup.py --quiet egg_info
	touch $@

# Test the plug-in inside vLLM: its hooks, rows and engines. vllm-campaign decodes 1,000 random
# prompts, which takes long.
test-vllm: setup $(VLLM)/ready
	$(VLLM_RUN) -m pytest -n $(WORKERS) --dist worksteal tests/with_vllm

vllm-campaign: setup $(VLLM)/ready
	$(VLLM_RUN) tests/with_vllm/campaign.py --kernels specops vllm

LM_EVAL := .venv-lm-eval

$(LM_EVAL)/ready: constraints.txt $(VENV)/test-deps
	$(BESIDE_THE_TESTS)
	$(ITS_PIP) -c constraints.txt "lm-eval[api]" accelerate datasets
	touch $@

# Run lm-eval's command line on the server and on transformers, in fp32. The target takes minutes.
test-lm-eval: setup $(LM_EVAL)/ready
	$(LM_EVAL)/bin/python -m pytest -s tests/with_lm_eval

# instructor requires an older openai than the other libraries, but works with the newer one.
CLIENTS := .venv-clients

$(CLIENTS)/ready: constraints.txt $(VENV)/test-deps
	$(BESIDE_THE_TESTS)
	$(ITS_PIP) -c constraints.txt langchain-openai==1.7.4 langchain-anthropic==1.7.10 litellm==1.110.2
	$(ITS_PIP) --no-deps instructor==1.17.0
	touch $@

# Test LangChain, LiteLLM and instructor with the server; `make test` tests pydantic-ai.
test-clients: setup $(CLIENTS)/ready
	$(CLIENTS)/bin/python -m pytest tests/with_clients

# Dynamo requires another pydantic than the tests.
DYNAMO := .venv-dynamo

$(DYNAMO)/ready: pyproject.toml $(VENV)/test-deps
	$(BESIDE_THE_TESTS)
	$(ITS_PIP) ai-dynamo==1.4.2
	touch $@

# Test engines behind Dynamo's frontend, without etcd and NATS.
test-dynamo: setup $(DYNAMO)/ready
	$(DYNAMO)/bin/python -m pytest tests/with_dynamo

# libggml-specops.so in build/llamacpp, for the ggml of this llama-cpp-python: its wheel has the
# libraries, its source distribution the headers (docs/llamacpp.md).
LLAMACPP := .venv-llamacpp
LLAMACPP_PINNED := $(shell grep ^llama-cpp-python== bench/peers/constraints.txt)

$(LLAMACPP)/ready: bench/peers/constraints.txt $(VENV)/build-deps
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	echo "$(abspath python)" > "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/specops.pth"
	$(ITS_PIP) $(LLAMACPP_PINNED) scikit-build-core==1.1.2
	rm -rf $(@D)/source
	$(@D)/bin/pip download --quiet --no-deps --no-build-isolation --no-binary :all: --dest $(@D)/source \
	  $(PIP_ARGS) $(LLAMACPP_PINNED)
	tar -xzf $(@D)/source/*.tar.gz -C $(@D)/source --strip-components 1
	touch $@

llamacpp: $(LLAMACPP)/ready
	PATH="$(abspath $(BIN)):$$PATH" cmake -G Ninja -S . -B build/cmake-llamacpp \
	  -DPython_EXECUTABLE="$(abspath $(BIN))/python" \
	  -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)" \
	  -DSPECOPS_ISAS="$(subst $() ,;,$(ISAS))" \
	  -DSPECOPS_GGML="$(abspath $(LLAMACPP))/source/vendor/llama.cpp/ggml" \
	  -DSPECOPS_GGML_LIB="$$($(LLAMACPP)/bin/python -c 'import llama_cpp; print(llama_cpp.__path__[0])')/lib"
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/cmake-llamacpp --target ggml_specops

# Install the environment of the peers; `make bench` compares with those that are installed.
bench-peers:
	$(BIN)/python -m bench.peers.setup $(if $(PIP_ARGS),--pip-args "$(PIP_ARGS)")

# Take the pictures of the page for docs/, with the bundled model; requires Chromium.
screenshots: setup $(VENV)/test-deps
	$(BIN)/python -m tools.screenshots

# Make the wheel of the suffix cache without torch, in build/wheels.
wheel-suffix: $(VENV)/build-deps
	rm -rf build/linked
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/linked ./suffix
	$(REPAIR) build/linked/*.whl

# Make the source distribution in build/sdist, and a wheel from it. The wheel is built outside this
# tree, in an isolated environment.
sdist: $(VENV)/build-deps
	rm -rf build/sdist
	$(BIN)/python -c "from setuptools.build_meta import build_sdist; build_sdist('build/sdist')" > /dev/null
	SPECOPS_ISAS=all SPECOPS_CUDA=OFF MAKEFLAGS= $(BIN)/pip wheel --quiet --no-deps --wheel-dir build/sdist \
	  $(PIP_ARGS) build/sdist/*.tar.gz

# Make a wheel from the source distribution for any x86-64 Linux with this Python and a C library
# from 2.31 on. This machine's compiler uses the headers and libraries of Debian 11, which
# debootstrap fetches as root. Absolute links among them are redirected to the folder of that
# Debian. The compiler's own libgcc is linked: an older one does not know newer CPU features, so
# only `portable` would run.
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
	  $(MAKE) --no-print-directory -C tools sdist
	$(REPAIR) build/sdist/*.whl

# Cross-compile a wheel for 64-bit ARM from the source distribution, and complete a text under qemu.
wheel-arm: $(VENV)/build-deps
	$(ARM) --wheel

# Test the wheel of `make wheel` and that of the source distribution on a Debian that has only
# Python. debootstrap makes it, which requires root.
test-bare: wheel sdist
	$(BIN)/python -m tools.bare_debian
	$(BIN)/python -m tools.bare_debian --wheel build/sdist/*.whl
