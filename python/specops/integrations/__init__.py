# SPDX-License-Identifier: Apache-2.0
"""specops inside other projects: vLLM, transformers, llama.cpp, and the engine in NVIDIA Dynamo."""
