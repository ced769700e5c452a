# SPDX-License-Identifier: Apache-2.0
"""A planned step as arrays and launches: filled, run, and read."""
