# SPDX-License-Identifier: Apache-2.0
"""Scheduler: slots, pages, and the passes that plan the rows of the next step."""
