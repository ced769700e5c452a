# SPDX-License-Identifier: Apache-2.0
"""Engines that compute one model together: what each has of it, and how they add up."""
