# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction modules."""
