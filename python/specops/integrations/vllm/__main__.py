# SPDX-License-Identifier: Apache-2.0
"""`python -m specops.integrations.vllm`: the commands verify-exactness and check-hooks."""

import sys
from collections.abc import Sequence

from specops.integrations.vllm import exactness, hooks


def main(arguments: Sequence[str]) -> int:
    """Run a command and return the exit code."""
    match list(arguments):
        case ["verify-exactness", *rest]:
            return exactness.main(rest)
        case ["check-hooks"]:
            return check_hooks()
    print("python -m specops.integrations.vllm must be followed by verify-exactness or check-hooks")
    return 2


def check_hooks() -> int:
    """Print every hook and its mismatch with the installed vLLM; return 1 if there is any."""
    wrong = 0
    for hook in hooks.HOOKS:
        fault = hooks.fault_of(hook)
        wrong += fault is not None
        print(f"{hook.part or 'all':10} {hook.how:10} {hook.target}: {fault or 'as expected'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
