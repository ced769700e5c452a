# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of specops beside its best peers; `python -m bench` runs them."""
