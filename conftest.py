# SPDX-License-Identifier: Apache-2.0
"""Hooks and fixtures of tests/ and tools/tests/: those of tests/fixtures.py."""

pytest_plugins = ["fixtures"]
