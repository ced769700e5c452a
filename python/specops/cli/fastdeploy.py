# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's command line: unsupported flags, and configurations that it reads differently.

Names are as in FastDeploy's docs/parameters.md and docs/features/speculative_decoding.md.
"""

import json
import logging
from typing import Any

_ONE_STEP = "steps mix prompts and decoding here; --max-num-batched-tokens bounds them"
_NO_IMAGES = "only text is supported; omit it"
_GRAPHS = "CUDA graphs are always used on a GPU; --enforce-eager turns them off"
_GRAMMARS = "constrained output is always enabled; omit it"

REFUSED = {
    "--block-size": "use --page-size",
    "--cache-queue-port": "the cache is in the engine's process; omit it",
    "--disable-custom-all-reduce": "sums over ranks have a fixed order; omit it",
    "--dynamic-load-weight": "weights do not change while a server runs; restart it",
    "--enable-chunked-prefill": f"long prompts are always split; {_ONE_STEP}",
    "--enable-logprob": "requests select logprobs; omit it",
    "--enable-mm": _NO_IMAGES,
    "--engine-worker-queue-port": "server and engine use a socket pair; omit it",
    "--gpu-memory-utilization": "use --num-pages, the number of KV pages",
    "--graph-optimization-config": _GRAPHS,
    "--guided-decoding-backend": _GRAMMARS,
    "--guided-decoding-disable-any-whitespace": "use --json-whitespace none",
    "--innode-prefill-ports": "servers of one topic find each other through Redis; omit it",
    "--kv-cache-ratio": "prompts and outputs share all pages; omit it",
    "--limit-mm-per-prompt": _NO_IMAGES,
    "--lm-head-fp32": "logits are always float32; omit it",
    "--long-prefill-token-threshold": _ONE_STEP,
    "--max-concurrency": "use --max-connections",
    "--max-long-partial-prefills": _ONE_STEP,
    "--max-num-partial-prefills": _ONE_STEP,
    "--max-waiting-time": "use --max-waiting, the number of requests that may wait",
    "--mm-processor-kwargs": _NO_IMAGES,
    "--num-gpu-blocks-override": "use --num-pages",
    "--static-decode-blocks": "pages are allocated as texts grow; omit it",
    "--swap-space": "prefix pages are not swapped; omit it",
    "--tokenizer": "the tokenizer is the one in the directory of --model",
    "--tool-parser-plugin": "use --tool-call-parser",
    "--use-cudagraph": _GRAPHS,
    "--use-warmup": "the server is ready once /health says so; omit it",
    "--workers": "one process serves HTTP, and one runs the engine; omit it",
}


# If one of these fields is present, `translated` leaves the suffix fields of method "mtp" alone.
_OF_STAGES = ("mtp_strategy", "options")

logger = logging.getLogger(__name__)


def translated(text: str) -> str:
    """Return a speculative configuration with the meaning that FastDeploy gives it; log changes.

    With "naive", FastDeploy ignores the number of drafts. Its documentation has a command with
    method "mtp" and fields of suffix decoding, which FastDeploy ignores as well; here they apply to
    requests with method "suffix".

    Args:
        text: a JSON object. Any other text is returned unchanged; a later check refuses it.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) < len(items):
            raise ValueError("a name is given twice")
        return dict(items)

    try:
        fields = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return text
    method = fields.get("method") if isinstance(fields, dict) else None
    if not isinstance(method, str):
        return text
    tokens = fields.get("num_speculative_tokens")
    if method.lower() == "naive" and type(tokens) is int and tokens > 0:
        logger.warning(
            'speculative_config: method "naive" drafts nothing; using num_speculative_tokens 0 '
            "instead of %d, as FastDeploy does",
            tokens,
        )
        return json.dumps({**fields, "num_speculative_tokens": 0})
    of_suffix = {key: value for key, value in fields.items() if key.startswith("suffix_decoding_")}
    if method.lower() == "mtp" and of_suffix and fields.keys().isdisjoint(_OF_STAGES):
        logger.warning(
            'speculative_config: method "mtp" runs MTP modules; the fields suffix_decoding_* '
            'apply to requests with method "suffix" only. Set "method" to "suffix" for suffix '
            "decoding"
        )
        others = {key: value for key, value in fields.items() if key not in of_suffix}
        return json.dumps({**others, "options": {"suffix": of_suffix}})
    return text


def require_known(flag: str) -> None:
    """Refuse a flag of FastDeploy that specops does not support.

    Args:
        flag: any argument of a command line, also in the form `--name=value`.

    Raises:
        ValueError: `flag` is such a flag.
    """
    name = flag.partition("=")[0].replace("_", "-")
    if name in REFUSED:
        raise ValueError(f"{name} is not supported: {REFUSED[name]}")
