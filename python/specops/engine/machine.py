# SPDX-License-Identifier: Apache-2.0
"""Settings derived from the machine and the model, such as the number of pages."""

import logging

from specops.api.config import EngineConfig
from specops.api.errors import ModelError
from specops.api.tokenizer import Tokenizer
from specops.engine.device import Device
from specops.engine.memory.kv_cache import PagePool
from specops.engine.models import CacheCapacity, KvBytes, Transformer
from specops.engine.parallel.ranks import Ranks
from specops.engine.scheduling.prompt_rows import MAX_PROMPT_ROWS
from specops.engine.sharing.prefixes import PrefixFinder
from specops.engine.sharing.row_costs import RowCosts

logger = logging.getLogger(__name__)

# Fraction for the KV cache of the GPU memory that the weights leave free; the rest is for
# activations, logits and graphs.
_GPU_SHARE = 0.85
_CPU_BYTES = 4 << 30  # default size of the KV cache
_STATE_SHARE = 0.25  # default fraction of the KV cache for states of prefixes

# Requests share the work of attention in whole leaves of LEAF_TOKENS tokens. On a GPU, sharing adds
# two launches to each layer, in whose time _LEAST_SAVED_BYTES could be read from memory.
LEAF_TOKENS = {"cpu": 64, "cuda": 256}
_LEAST_SAVED_BYTES = {"cpu": 0, "cuda": 16 << 20}

# Number of rows that a step can compute in about the time it takes to read the weights and start
# the ops. With the bundled model on two Zen 5 cores, a step takes 0.33 ms and a row 0.07 to 0.11
# ms.
FREE_ROWS = {"cpu": 4, "cuda": 64}

# Costs of rows for an engine that does not measure them; servers do (step_costs.py). With the
# bundled model, a scored row takes 1.3 to 1.5 times as long as a row without log-probabilities. On
# a GPU, rows beyond the free ones take little time until a step becomes compute-bound.
ROW_COSTS = {
    "cpu": RowCosts(step=4, row=1, scored_row=0.5),
    "cuda": RowCosts(step=256, row=1, scored_row=1),
}


def free_rows_of(config: EngineConfig, device: Device) -> int:
    """Return the number of rows that hardly prolong a step on a device.

    Log a message if prompts get fewer rows than an explicit max_num_batched_tokens.
    """
    free_rows = FREE_ROWS[device.device.type]
    requested = config.max_num_batched_tokens
    most = MAX_PROMPT_ROWS * free_rows
    if requested > most and requested != EngineConfig.max_num_batched_tokens:
        logger.info(
            "prompts get %d of the %d rows of a step (max_num_batched_tokens)", most, requested
        )
    return free_rows


def one_rank(config: EngineConfig) -> Ranks:
    """Return the tensor-parallel group of an engine with a single rank.

    Raises:
        ValueError: tensor_parallel_size is above 1.
    """
    if config.tensor_parallel_size > 1:
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size} needs as many processes; start "
            "a server, or use 1 for an engine in this process"
        )
    return Ranks(config.num_virtual_ranks, config.enable_expert_parallel)


def tokenizer_of(config: EngineConfig) -> Tokenizer:
    """Read the model's tokenizer.

    Raises:
        ModelError: the tokenizer cannot be read.
    """
    try:
        return Tokenizer.from_dir(config.model_dir)
    except ValueError as error:
        raise ModelError(str(error)) from error


def warn_of_more_tokens(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Log a warning if the tokenizer has more tokens than the model.

    The additional tokens have no logits and are never sampled; prompts that contain one are
    rejected.
    """
    if tokenizer.num_tokens > vocab_size:
        logger.warning(
            "the tokenizer has %d tokens, the model %d: prompts with tokens from %d on are refused",
            tokenizer.vocab_size,
            vocab_size,
            vocab_size,
        )
        if tokenizer.eos_token_ids and min(tokenizer.eos_token_ids) >= vocab_size:
            logger.warning(
                "the model has no row for any end token: only max_tokens and stops end outputs"
            )


def capacity_of(
    config: EngineConfig, device: Device, model: Transformer, of_drafters: KvBytes
) -> CacheCapacity:
    """Choose the capacity of an engine's caches.

    Memory goes to per-slot data first, then to states of prefixes, then to pages. All ranks have
    the same numbers of pages and slots, for different heads. Ranks on a CPU share its memory.

    Args:
        config: the engine's configuration.
        device: device of the caches; the weights are loaded already.
        model: the target.
        of_drafters: memory that all drafters need.

    Raises:
        ValueError: the caches do not fit the memory, or a request of full length does not fit the
            pages.
    """
    shared = model.ranks.size if device.device.type == "cpu" else 1
    num_drafts = config.speculative_config.num_speculative_tokens
    slots = config.max_num_seqs * (model.kv_bytes_per_slot(num_drafts) + of_drafters.per_slot)
    free = model.ranks.least(device.free_bytes() // shared)
    if slots > free:
        raise ValueError(
            f"max_num_seqs must fit the memory of {device.device}: states of "
            f"{config.max_num_seqs} requests with {num_drafts} drafts take {_gib(slots)}, and "
            f"{_gib(free)} are free; lower max_num_seqs"
        )
    free -= slots
    budget = config.kv_cache_bytes
    if budget is None:
        budget = _CPU_BYTES if device.device.type == "cpu" else int(free * _GPU_SHARE)
    per_request = -(-model.max_model_len // config.page_size)
    most_pages = config.num_pages or per_request * config.max_num_seqs
    num_prefix_states = 0
    state_bytes = model.kv_bytes_per_slot(0) + of_drafters.per_prefix
    if state_bytes and config.enable_prefix_caching:
        # A prefix ends at the end of a page, so there are at most as many prefixes as pages.
        num_prefix_states = min(
            _num_prefix_states(config, state_bytes, min(budget, free)), most_pages
        )
        free -= num_prefix_states * state_bytes
        budget -= num_prefix_states * state_bytes
        logger.info("state cache for %d prefixes, %d bytes each", num_prefix_states, state_bytes)
    page_bytes = (model.kv_bytes_per_token() + of_drafters.per_token) * config.page_size
    pages = most_pages
    if config.num_pages is None:
        pages = min(most_pages, min(budget, free) // page_bytes)
    elif pages * page_bytes > free:
        raise ValueError(
            f"num_pages must fit the memory of {device.device}: {pages} pages take "
            f"{_gib(pages * page_bytes)}, and {_gib(free)} are free; lower num_pages"
        )
    if pages < per_request:
        raise ValueError(
            f"num_pages must be at least {per_request} so that one request of max_model_len="
            f"{model.max_model_len} tokens fits, got {pages}; lower max_model_len, or raise "
            "num_pages or kv_cache_bytes"
        )
    return CacheCapacity(
        pages, config.page_size, config.max_num_seqs, num_drafts, num_prefix_states
    )


def _num_prefix_states(config: EngineConfig, state_bytes: int, budget: int) -> int:
    """Return the number of prefixes whose states can be stored, at least one."""
    requested = config.state_cache_bytes
    if requested is None:
        requested = max(int(budget * _STATE_SHARE), state_bytes)
    if not state_bytes <= requested <= budget:
        raise ValueError(
            f"state_cache_bytes must be at least {state_bytes}, the bytes of one prefix's states, "
            f"and at most {budget}, the bytes of the whole cache, got {requested}; change it or "
            "kv_cache_bytes, or turn enable_prefix_caching off"
        )
    return requested // state_bytes


def prefix_finder_of(
    config: EngineConfig, model: Transformer, pool: PagePool
) -> PrefixFinder | None:
    """Return the finder of shared prefixes for cascade attention, or None if that is off."""
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
