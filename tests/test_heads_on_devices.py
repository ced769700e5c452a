# SPDX-License-Identifier: Apache-2.0
"""Drafters with weights of their own through the CUDA kernels, eager and replayed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from specops.engine import Engine, EngineConfig, SpeculativeConfig
from test_engine_devices import interpreter, twin
from test_lossless import bits
from test_trained_heads import TEXTS, greedy, target
from twin_device import TwinDevice

from tools.train.heads import HEADS, new_head
from tools.train.model import Model
from tools.train.train_heads import save_head

__all__ = ["interpreter", "target", "twin"]  # fixtures


@pytest.mark.parametrize("name", [*HEADS, "draft_model"])
def test_every_bit_is_plain_decoding_s_in_the_interpreter(
    target: tuple[Path, Model],
    tmp_path: Path,
    interpreter: None,
    twin: Callable[..., TwinDevice],
    name: str,
) -> None:
    directory, model = target
    drafts_from = directory
    if name in HEADS:
        torch.manual_seed(3)
        save_head(tmp_path, new_head(name, model), 0)
        drafts_from = tmp_path
    own = {"method": name, "model": str(drafts_from), "num_speculative_tokens": 3}
    results = []
    for config, captures in (({"method": "naive"}, False), (own, False), (own, True)):
        twin(captures=captures)
        speculative = SpeculativeConfig.from_dict(config)
        engine = Engine(
            EngineConfig(model=str(directory), max_num_seqs=2, speculative_config=speculative)
        )
        results.append(list(map(bits, engine.generate(TEXTS[:2], greedy(8)))))
        assert not engine._drafting.num_failures
    assert engine.num_captures > 0 and engine.stats.speculative.num_draft_tokens > 0
    assert results[1] == results[0] and results[2] == results[0]
