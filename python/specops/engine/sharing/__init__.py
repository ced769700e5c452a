# SPDX-License-Identifier: Apache-2.0
"""Fair scheduling: how clients share slots, the rows of a step, and the time for grammars."""
