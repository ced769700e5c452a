# SPDX-License-Identifier: Apache-2.0
"""Imports of the process from which `forked` forks engines."""

import vllm.entrypoints.llm
import vllm.v1.worker.cpu_worker  # noqa: F401
