# SPDX-License-Identifier: Apache-2.0
"""Pages of the KV cache, and the memory and shapes of steps."""
