# SPDX-License-Identifier: Apache-2.0
"""What every CUDA kernel must pass before a GPU sees it: `make gates`, which needs no GPU."""
