# SPDX-License-Identifier: Apache-2.0
"""The form of a file that `specops bench` writes and `specops plot` reads."""

KIND = "specops bench"
VERSION = 1
