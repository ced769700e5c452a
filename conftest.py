# SPDX-License-Identifier: Apache-2.0
"""Hooks and fixtures of tests/ and tools/tests/: those of tests/shared_fixtures.py."""

pytest_plugins = ["shared_fixtures"]
