# SPDX-License-Identifier: Apache-2.0
"""Numerics that only hardware decides: `python -m tools.gpu_check.numerics`.

The kernels have run in the interpreter under assumptions about GPUs: how mma rounds, what ex2 and
rsqrt return, that a graph repeats the captured call. This check tests them on the device.
"""
