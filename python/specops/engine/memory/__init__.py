# SPDX-License-Identifier: Apache-2.0
"""Pages of the KV cache, and the memory that steps run in: on which device, of which shapes."""
