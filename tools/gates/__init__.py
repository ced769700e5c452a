# SPDX-License-Identifier: Apache-2.0
"""Static checks of every CUDA kernel before it runs on a GPU: `make gates`, which needs no GPU."""
