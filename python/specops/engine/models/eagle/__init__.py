# SPDX-License-Identifier: Apache-2.0
"""EAGLE heads: their file layouts, and their forward pass."""
