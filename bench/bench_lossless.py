# SPDX-License-Identifier: Apache-2.0
"""Texts changed by speculation: 20 prompts of each kind x 128 greedy tokens in bf16.

Every system drafts 4 tokens by prompt lookup on the same weights and the same prompts.
"""

import subprocess
from typing import Any

from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig

from bench.bench_engine import NAMES, PEERS, prompt_token_ids
from bench.checkpoints import bundled
from bench.common import Bench, Figure, PeerError

NUM_PROMPTS = 20
MAX_TOKENS = 128
DRAFTS = 4


def run_lossless(bench: Bench) -> None:
    """Count the prompts whose 128 tokens differ; specops must change none."""
    engine = Engine(
        EngineConfig(
            device="cpu",
            speculative_config=SpeculativeConfig(method="naive"),
            num_threads=bench.num_threads,
        )
    )
    prompts = {
        kind: prompt_token_ids(engine, kind)[:NUM_PROMPTS] for kind in ("edits", "completions")
    }
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    drafting = {"method": "ngram", "num_speculative_tokens": DRAFTS, "adaptive_verification": False}
    configs = ({"method": "naive"}, drafting)
    for kind, token_ids in prompts.items():
        plain, drafted = (
            [
                done.token_ids
                for done in engine.generate(token_ids, params, speculative_config=config)
            ]
            for config in configs
        )
        _figure(bench, kind, "specops", plain, drafted, "value == 0")
    checkpoint = bundled()
    for name in PEERS:
        peer = bench.peer(name)
        if peer is None:
            continue
        try:
            peer.ask("load", model=str(checkpoint.for_peer(name)))
            for kind, token_ids in prompts.items():
                plain, drafted = (_tokens(peer, token_ids, lookup) for lookup in (0, DRAFTS))
                _figure(bench, kind, NAMES[name], plain, drafted, None)
        except (PeerError, subprocess.CalledProcessError) as error:
            print(f"  no {name}: {error}", flush=True)
        finally:
            peer.close()


def _tokens(peer: Any, prompts: list[list[int]], lookup: int) -> list[list[int]]:
    answer = peer.ask("generate", prompts=prompts, max_tokens=MAX_TOKENS, lookup=lookup)
    token_ids: list[list[int]] = answer["token_ids"]
    return token_ids


def _figure(
    bench: Bench,
    kind: str,
    label: str,
    plain: list[list[int]],
    drafted: list[list[int]],
    bar: str | None,
) -> None:
    differ = sum(a != b for a, b in zip(plain, drafted, strict=True))
    bench.add(
        Figure(
            f"lossless.{kind}.{label.split()[0].lower().replace('.', '_')}",
            f"{label}: of {NUM_PROMPTS} greedy texts of {MAX_TOKENS} tokens ({kind}), how many "
            "speculation changes",
            differ,
            f"of {NUM_PROMPTS}",
            bar=bar,
            threads=bench.num_threads,
        )
    )
