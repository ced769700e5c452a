# SPDX-License-Identifier: Apache-2.0
"""How requests share what there is: slots, the rows of a step, and the time for grammars."""
