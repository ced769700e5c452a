# SPDX-License-Identifier: Apache-2.0
"""Numbers that only hardware decides: `python -m tools.gpu_check.numerics`.

The kernels have run in the interpreter under rules for what a GPU is said to do: how mma rounds,
what ex2 and rsqrt give, that a graph repeats what was captured. Here the device is asked.
"""
