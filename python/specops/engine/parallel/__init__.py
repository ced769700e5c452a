# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: ranks that compute one model together, and their collectives."""
