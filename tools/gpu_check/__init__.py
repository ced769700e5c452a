# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check`: everything that needs an NVIDIA GPU, on any machine with torch and nvcc.

The most informative steps come first: facts about the machine, numerics that only hardware decides,
and where the time goes; then figures, sweeps, peers, the tests and the sanitizers. The check needs
neither network nor git (COMMIT names the measured revision). Every step has a time limit, and a
failed step stops no other. Results are written as they arrive to bench/results/<gpu>-<date>.json,
which a later part of the same day extends, and from there to a Markdown report beside it.
"""
