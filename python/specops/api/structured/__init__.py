# SPDX-License-Identifier: Apache-2.0
"""Constraints on the output, as a request states them, and the formats they are written in."""

from specops.api.structured.output import StructuredOutput

__all__ = ["StructuredOutput"]
