# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads: what their files say, and their pass."""
