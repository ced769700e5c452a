# SPDX-License-Identifier: Apache-2.0
"""The target's own outputs, on which draft heads are trained because they draft nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from torch import Tensor

from tools.train.train import Ids

PROMPT_TOKENS, NEW_TOKENS = 96, 256
TEMPERATURE = 0.7


def own_outputs(
    model: Path, documents: Sequence[Ids], count: int, seed: int, cache: Path
) -> Tensor:
    """Return texts of the target, each of which continues a random piece of a document.

    Args:
        model: directory of the target.
        documents: encoded; prompts are cut from them at random places.
        count: number of texts.
        seed: seed of the places. Text i is sampled with the seed i.
        cache: a file with the texts; it is read if it exists and written otherwise.

    Returns:
        int64 [count, PROMPT_TOKENS + NEW_TOKENS].
    """
    if not cache.exists():
        rng = np.random.default_rng(seed)
        long = [one for one in documents if len(one) > PROMPT_TOKENS]
        weights = np.array([len(one) for one in long], dtype=np.float64)
        chosen = rng.choice(len(long), size=count, p=weights / weights.sum())
        prompts = []
        for index in chosen:
            begin = int(rng.integers(len(long[index]) - PROMPT_TOKENS))
            prompts.append(long[index][begin : begin + PROMPT_TOKENS].astype(int).tolist())
        texts = continuations(model, prompts, NEW_TOKENS, TEMPERATURE)
        temporary = cache.with_name(f".{cache.name}.tmp")
        save_file({"tokens": texts.int()}, temporary)
        os.replace(temporary, cache)
    return load_file(cache)["tokens"].long()


def continuations(
    model: Path, prompts: Sequence[list[int]], new_tokens: int, temperature: float
) -> Tensor:
    """Continue prompts of one length; prompt i is sampled with the seed i.

    Args:
        model: directory of the target.
        prompts: token ids.
        new_tokens: tokens to generate for each prompt.
        temperature: sampling temperature.

    Returns:
        int64 [prompts, tokens], including the prompts.
    """
    engine = Engine(
        EngineConfig(
            model=str(model),
            device="cpu",
            speculative_config=SpeculativeConfig.from_dict({"method": "naive"}),
            max_num_seqs=64,
            num_threads=torch.get_num_threads(),
        )
    )
    params = [
        SamplingParams(max_tokens=new_tokens, temperature=temperature, seed=index, ignore_eos=True)
        for index in range(len(prompts))
    ]
    done = engine.generate(prompts, params)
    texts = [[*one, *result.token_ids] for one, result in zip(prompts, done, strict=True)]
    return torch.tensor(texts)
