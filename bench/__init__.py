# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of specops and of its fastest peers; `python -m bench` runs them."""
