# SPDX-License-Identifier: Apache-2.0
"""What an engine makes of its machine and model: pages, and from where on sharing pays."""

import logging
from dataclasses import replace

from specops.engine.config import EngineConfig
from specops.engine.device import Device
from specops.engine.memory.kv_cache import PagePool
from specops.engine.models import Transformer
from specops.engine.parallel.ranks import Ranks
from specops.engine.scheduling.prompt_rows import MAX_PROMPT_ROWS
from specops.engine.sharing.prefixes import PrefixFinder

logger = logging.getLogger(__name__)

# Of a GPU's memory beside the weights, for keys and values; activations, logits and graphs are the
# rest.
_GPU_SHARE = 0.85
_CPU_BYTES = 4 << 30  # for keys and values, where nothing else is said

# Attention shares whole leaves of so many tokens. On a GPU declaring adds two launches to each
# layer, in the time of which so many bytes are read.
LEAF_TOKENS = {"cpu": 64, "cuda": 256}
_LEAST_SAVED_BYTES = {"cpu": 0, "cuda": 16 << 20}

# Rows that a step computes in about the time in which it reads the weights and starts its ops. Of
# the bundled model on two cores of a Zen 5: 0.33 ms a step, and 0.07 to 0.11 ms a row.
FREE_ROWS = {"cpu": 4, "cuda": 64}


def free_rows_of(config: EngineConfig, device: Device) -> int:
    """The rows that a step computes on a device in about the time that it takes anyway.

    The log says where prompts get fewer rows than a configuration asks for by name.
    """
    free_rows = FREE_ROWS[device.device.type]
    asked, most = config.max_num_batched_tokens, MAX_PROMPT_ROWS * free_rows
    if asked > most and asked != EngineConfig.max_num_batched_tokens:
        logger.info("of the %d rows of a step (max_num_batched_tokens) prompts get %d", asked, most)
    return free_rows


def one_rank(config: EngineConfig) -> Ranks:
    """Returns the only rank of an engine by itself.

    Raises:
        ValueError: the engine is to be one of several.
    """
    if config.tensor_parallel_size > 1:
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size} needs as many processes, which a "
            "server starts; an engine in a process of its caller's must have 1"
        )
    return Ranks(config.num_slices, config.enable_expert_parallel)


def fitted(config: EngineConfig, model: Transformer) -> EngineConfig:
    """Returns a configuration as the model can have it.

    A prefix is of no use to a request without the states that its end left, and these are kept for
    running requests alone: such models have no prefix cache.
    """
    config = config.decided_for(model.device.type)
    if model.keeps_states and config.enable_prefix_caching:
        logger.info("enable_prefix_caching is off: the model has linear attention")
        config = replace(config, enable_prefix_caching=False)
    return config


def num_pages_of(
    config: EngineConfig, device: Device, bytes_per_token: int, model: Transformer
) -> int:
    """Chooses how many KV pages an engine has.

    Args:
        config: of the engine.
        device: where they will lie; the weights are there.
        bytes_per_token: of the keys and values of model and drafters.
        model: what its slots keep needs room as well. Its ranks have as many pages, each of its own
            heads: those of a CPU share one memory.

    Raises:
        ValueError: they do not fit the memory, or no request of full length fits them.
    """
    ranks, max_model_len = model.ranks, model.max_model_len
    per_request = -(-max_model_len // config.page_size)
    page_bytes = bytes_per_token * config.page_size
    shared = ranks.size if device.device.type == "cpu" else 1
    num_drafts = config.speculative_config.num_speculative_tokens
    kept = config.max_num_seqs * model.kv_bytes_per_slot(num_drafts)
    free = ranks.least(device.free_bytes() // shared)
    if kept > free:
        raise ValueError(
            f"max_num_seqs must fit the memory of {device.device}: what {config.max_num_seqs} "
            f"requests of {num_drafts} drafts keep takes {_gib(kept)}, and {_gib(free)} are "
            "free"
        )
    free -= kept
    if config.num_pages is not None:
        pages = config.num_pages
        if pages * page_bytes > free:
            raise ValueError(
                f"num_pages must fit the memory of {device.device}: {pages} pages take "
                f"{_gib(pages * page_bytes)}, and {_gib(free)} are free"
            )
    else:
        budget = config.kv_cache_bytes
        if budget is None:
            budget = _CPU_BYTES if device.device.type == "cpu" else int(free * _GPU_SHARE)
        pages = min(per_request * config.max_num_seqs, min(budget, free) // page_bytes)
    if pages < per_request:
        raise ValueError(
            f"num_pages must be at least {per_request} so that one request of max_model_len="
            f"{max_model_len} tokens fits, got {pages}; lower max_model_len or raise it"
        )
    return pages


def prefix_finder_of(
    config: EngineConfig, model: Transformer, pool: PagePool
) -> PrefixFinder | None:
    """Makes what finds shared prefixes, where declaring them pays; None: they are not wanted."""
    if not config.enable_cascade_attention:
        return None
    kind = model.device.type
    least_bytes = _LEAST_SAVED_BYTES[kind] * len(model.layers)
    return PrefixFinder(
        pool,
        leaf_tokens=LEAF_TOKENS[kind],
        least_saved_tokens=-(-least_bytes // model.kv_bytes_per_token()),
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
