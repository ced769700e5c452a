# SPDX-License-Identifier: Apache-2.0
"""vLLM's own drafters with weights change no bit, whether their drafts are right or not."""

from pathlib import Path
from typing import Any

import pytest
from campaign import joined, runs_of, small
from forked import decode
from heads import NUM_HEADS, write_head
from specops.integrations.vllm.decoding import Decoded, DecodingError, Job, Run
from specops.integrations.vllm.settings import EXACT

ENGINE = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 32}


@pytest.fixture(scope="module")
def alone(bundled: str) -> Decoded:
    """Decode every prompt alone and without drafts."""
    engine = ENGINE | {"model": bundled, "enable_prefix_caching": False}
    return decode(Job(engine, [Run(*small(), 1)], EXACT))[0]


def drafting(bundled: str, folder: Path, method: str, **more: Any) -> dict[str, Any]:
    """Return the settings of an engine with a drafter."""
    if method == "draft_model":  # the model itself, whose likeliest tokens are often right
        config: dict[str, Any] = {"method": method, "model": bundled}
    elif method == "peagle":
        config = {"method": "eagle3", "parallel_drafting": True}
        config["model"] = write_head(folder / method, method)
    else:
        config = {"method": method, "model": write_head(folder / method, method)}
    config["num_speculative_tokens"] = NUM_HEADS
    engine = ENGINE | {"model": bundled, "speculative_config": config, "disable_log_stats": False}
    return engine | more


# Minimum number of accepted drafts per 100. Heads were trained on other texts than these random
# ones, and random heads are never right.
RIGHT = {"draft_model": 40, "eagle3": 3, "dflash": 1, "eagle": 0, "peagle": 1, "medusa": 0}


@pytest.mark.parametrize("method", RIGHT)
def test_no_drafter_with_weights_changes_a_bit(
    bundled: str, alone: Decoded, tmp_path: Path, method: str
) -> None:
    crowded = {"enable_prefix_caching": True, "max_num_batched_tokens": 256}
    engine = drafting(bundled, tmp_path, method, **crowded)
    parts = decode(Job(engine, runs_of(*small(), 5), EXACT))
    whole = joined(parts)
    assert whole.token_ids == alone.token_ids
    assert whole.logprobs == alone.logprobs
    drafts, accepted = parts[-1].num_drafts, parts[-1].num_accepted
    assert drafts > 300 and accepted < drafts
    assert 100 * accepted >= RIGHT[method] * drafts, (drafts, accepted)


def test_preemption_of_requests_with_drafts_changes_no_bit(
    bundled: str, alone: Decoded, tmp_path: Path
) -> None:
    """The cache has memory for a few requests only."""
    engine = drafting(bundled, tmp_path, "eagle3", num_gpu_blocks_override=9)
    whole = decode(Job(engine, [Run(*small(), 24, 1)], EXACT))[0]
    assert whole.num_preemptions > 0
    assert whole.token_ids == alone.token_ids
    assert whole.logprobs == alone.logprobs


def test_dspark_is_refused(bundled: str, tmp_path: Path) -> None:
    engine = drafting(bundled, tmp_path, "dspark")
    with pytest.raises(DecodingError, match="dspark speculative decoding"):
        decode(Job(engine, [Run([[1, 2]], [{"max_tokens": 2}], 1)], EXACT))
