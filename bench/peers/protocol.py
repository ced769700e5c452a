# SPDX-License-Identifier: Apache-2.0
"""The loop every peer runs: a JSON request per line in, a JSON answer per line out.

This module runs in the peers' own environment, so it uses only the standard library. Output of a
library goes to stderr, which the benchmark stores as bench/work/<peer>.log.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Answer = dict[str, Any]


def serve(handlers: Mapping[str, Callable[..., Answer]]) -> None:
    """Answer requests until stdin ends; `op` names the handler, the rest are its arguments."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = handlers[request.pop("op")](**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
