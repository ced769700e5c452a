# SPDX-License-Identifier: Apache-2.0
"""EAGLE heads: what their files say, and their pass."""
