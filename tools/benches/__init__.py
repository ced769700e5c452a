# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that answered one question each; `make bench ONLY=FAMILY` runs them."""
