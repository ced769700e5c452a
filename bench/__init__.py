# SPDX-License-Identifier: Apache-2.0
"""Measurements of specops beside its best peers; `python -m bench` runs them."""
