# SPDX-License-Identifier: Apache-2.0
"""Format of the files that `specops bench` writes and `specops plot` reads."""

KIND = "specops bench"
VERSION = 1
