# SPDX-License-Identifier: Apache-2.0
"""specops inside other projects: its ops in vLLM and transformers, its engine in NVIDIA Dynamo."""
