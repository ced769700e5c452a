# SPDX-License-Identifier: Apache-2.0
"""Execution of planned steps: input arrays, kernel launches and results."""
