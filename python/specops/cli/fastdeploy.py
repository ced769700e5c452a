# SPDX-License-Identifier: Apache-2.0
"""Flags of FastDeploy that this server has not: each is refused with what to do instead.

Names as in its docs/parameters.md and docs/features/speculative_decoding.md.
"""

_ONE_STEP = "steps mix prompts and decoding here; --max-num-batched-tokens bounds them"
_NO_IMAGES = "models read text alone; leave it out"
_GRAPHS = "graphs are captured on a GPU as it is; --enforce-eager turns them off"
_GRAMMARS = "constrained output is always there; leave it out"

REFUSED = {
    "--block-size": "say --page-size",
    "--cache-queue-port": "the cache is in the engine's own process; leave it out",
    "--disable-custom-all-reduce": "sums over ranks have one order; leave it out",
    "--dynamic-load-weight": "weights do not change while a server runs; start it again",
    "--enable-chunked-prefill": f"long prompts are always cut; {_ONE_STEP}",
    "--enable-logprob": "logprobs are always there; a request asks for them",
    "--enable-mm": _NO_IMAGES,
    "--engine-worker-queue-port": "server and engine talk through a socket pair; leave it out",
    "--gpu-memory-utilization": "say --num-pages, the number of KV pages",
    "--graph-optimization-config": _GRAPHS,
    "--guided-decoding-backend": _GRAMMARS,
    "--guided-decoding-disable-any-whitespace": "say --json-whitespace none",
    "--innode-prefill-ports": "servers of one topic find each other by Redis; leave it out",
    "--kv-cache-ratio": "prompts and outputs share all pages; leave it out",
    "--limit-mm-per-prompt": _NO_IMAGES,
    "--lm-head-fp32": "logits are always float32; leave it out",
    "--long-prefill-token-threshold": _ONE_STEP,
    "--max-concurrency": "say --max-connections",
    "--max-long-partial-prefills": _ONE_STEP,
    "--max-num-partial-prefills": _ONE_STEP,
    "--max-waiting-time": "say --max-waiting, the number of requests that may wait",
    "--mm-processor-kwargs": _NO_IMAGES,
    "--num-gpu-blocks-override": "say --num-pages",
    "--reasoning-parser": "reasoning is not told apart; leave it out",
    "--revision": "download that version, and give its directory as --model",
    "--static-decode-blocks": "pages are taken as texts grow; leave it out",
    "--swap-space": "pages of prefixes stay in one memory; leave it out",
    "--tokenizer": "the tokenizer is the one in the directory of --model",
    "--tool-parser-plugin": "say --tool-call-parser",
    "--use-cudagraph": _GRAPHS,
    "--use-warmup": "the server is ready once /health says so; leave it out",
    "--workers": "one process serves HTTP, and one runs the engine; leave it out",
}


def require_known(flag: str) -> None:
    """Refuses a flag of FastDeploy that has no meaning here.

    Args:
        flag: as on a command line; may be `--name=value`, and any other argument.

    Raises:
        ValueError: it is one.
    """
    name = flag.partition("=")[0].replace("_", "-")
    if name in REFUSED:
        raise ValueError(f"{name} is FastDeploy's: {REFUSED[name]}")
