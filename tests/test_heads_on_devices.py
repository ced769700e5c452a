# SPDX-License-Identifier: Apache-2.0
"""Drafters with weights of their own on the CUDA kernels, eager and replayed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle_oracle
import pytest
import test_dflash
import test_residual_heads
import torch
from fake_gpu import FakeGpu
from specops.engine import Engine, EngineConfig, SpeculativeConfig
from test_lossless import bits
from test_trained_heads import TEXTS, greedy, target
from test_trees import count_steps

from tools.train.heads import HEADS, new_head
from tools.train.model import Model
from tools.train.train_heads import save_head

pytestmark = pytest.mark.ci

__all__ = ["target"]  # a fixture


def write_dflash2(directory: Path) -> None:
    test_dflash.KINDS["dflash2"].write(directory, num_target_layers=4)


# Layouts that tools/train does not train: the method, and a function that writes a random head.
RANDOM: dict[str, tuple[str, Callable[[Path], None]]] = {
    "peagle": (
        "eagle3",
        lambda folder: eagle_oracle.write(folder, eagle_oracle.Head((1, 2, 3), mask=7), "official"),
    ),
    "hydra++": ("hydra", lambda folder: test_residual_heads.KINDS["hydra++"].write(folder)),
    "dflash2": ("dflash", write_dflash2),
}


@pytest.mark.fast("eagle*", "dflash", "hydra", "medusa", "draft_model", "dflash2")
@pytest.mark.parametrize("name", [*HEADS, *RANDOM])
def test_heads_keep_the_bits_of_plain_decoding_in_the_interpreter(
    target: tuple[Path, Model],
    tmp_path: Path,
    interpreter: None,
    use_fake_gpu: Callable[..., FakeGpu],
    name: str,
) -> None:
    directory, model = target
    if name in HEADS:
        torch.manual_seed(3)
        save_head(tmp_path, new_head(name, model), 0)
        shutil.copy(directory / "tokenizer.json", tmp_path)
    else:
        name, write = RANDOM[name]
        write(tmp_path)
    own = {"method": name, "model": str(tmp_path), "num_speculative_tokens": 3}
    check_in_the_interpreter(directory, own, use_fake_gpu)


def test_merged_trees_are_verified_in_the_interpreter(
    target: tuple[Path, Model],
    tmp_path: Path,
    interpreter: None,
    use_fake_gpu: Callable[..., FakeGpu],
) -> None:
    directory, model = target
    torch.manual_seed(3)
    save_head(tmp_path, new_head("eagle3", model), 0)
    own = {
        "method": "eagle3+suffix",
        "model": str(tmp_path),
        "num_speculative_tokens": 6,
        "num_model_steps": 2,
        "tree": True,
        "suffix_decoding_min_token_prob": 0.02,
    }
    assert max(check_in_the_interpreter(directory, own, use_fake_gpu)) > 0  # there are branches


def check_in_the_interpreter(
    directory: Path, own: dict[str, Any], use_fake_gpu: Callable[..., FakeGpu]
) -> list[int]:
    """Check that two requests, eager and replayed, have the bits of plain decoding.

    Returns:
        Number of chains beyond the number of requests, of every replayed step.
    """
    results = []
    for config, captures in (({"method": "naive"}, False), (own, False), (own, True)):
        use_fake_gpu(captures=captures)
        speculative = SpeculativeConfig.from_dict(config)
        engine = Engine(
            EngineConfig(model=str(directory), max_num_seqs=2, speculative_config=speculative)
        )
        branches = count_steps(engine)
        results.append(list(map(bits, engine.generate(TEXTS[:2], greedy(8)))))
        assert not engine._drafting.num_failures
    assert engine.num_captures > 0 and engine.stats.speculative.num_draft_tokens > 0
    assert results[1] == results[0] and results[2] == results[0]
    return branches
