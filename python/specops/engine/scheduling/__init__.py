# SPDX-License-Identifier: Apache-2.0
"""Who has rows in the next step: slots and pages, and the passes that make a plan."""
