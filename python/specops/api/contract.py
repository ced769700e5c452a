# SPDX-License-Identifier: Apache-2.0
"""Digests of execution contracts (service/contract.py), also for requests with a LoRA adapter."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def with_digest(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a contract: everything that output bits depend on, and the digest of that."""
    text = json.dumps(facts, sort_keys=True)
    return {**facts, "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


def with_adapter(contract: Mapping[str, Any], adapter: str | None) -> dict[str, Any]:
    """Return the contract of requests that use a LoRA adapter.

    Args:
        contract: the contract of the engine.
        adapter: digest of the adapter; None returns the engine's own contract.
    """
    if adapter is None:
        return dict(contract)
    facts = {name: value for name, value in contract.items() if name != "digest"}
    return with_digest({**facts, "adapter": adapter})
