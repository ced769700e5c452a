# SPDX-License-Identifier: Apache-2.0
"""Who has rows in the next step: slots, pages, turns, and the prefixes that requests share."""
