# SPDX-License-Identifier: Apache-2.0
"""What the process imports from which engines are forked (see `forked`)."""

import vllm.entrypoints.llm
import vllm.v1.worker.cpu_worker  # noqa: F401
