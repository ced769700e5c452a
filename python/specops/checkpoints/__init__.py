# SPDX-License-Identifier: Apache-2.0
"""Readers of checkpoints: quantized and plain weights by the names that models use."""
