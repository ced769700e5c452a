# SPDX-License-Identifier: Apache-2.0
"""Drafts found in text already seen: a suffix tree over the texts of many requests."""
