# SPDX-License-Identifier: Apache-2.0
"""The ops and the engine inside other projects: vLLM, Hugging Face transformers, NVIDIA Dynamo."""
