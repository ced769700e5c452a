# SPDX-License-Identifier: Apache-2.0
"""The weights of checkpoints, quantized or not, by the names that models know them by."""
