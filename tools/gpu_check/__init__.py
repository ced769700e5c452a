# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check`: everything that needs an NVIDIA GPU, on any machine with torch and nvcc.

What tells most comes first: facts of the machine, numerics that only hardware decides, where the
time goes, then figures, sweeps, peers, the tests and the sanitizers. Asks for no network and no git
(COMMIT says what is measured). Every step is bounded in time, a failed one stops no other, and what
it found is written as it comes: to bench/results/<gpu>-<date>.json, which a later part of the same
day adds to, and from that to a report in Markdown beside it.
"""
