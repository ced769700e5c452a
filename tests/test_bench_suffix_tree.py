# SPDX-License-Identifier: Apache-2.0
"""The bench of the suffix tree runs at small sizes without its peer."""

from pathlib import Path

import numpy as np
import pytest

from bench import bench_suffix_tree, common, suffix_streams

pytestmark = pytest.mark.ci


def small_streams(folder: Path) -> None:
    """Save requests made of repeated words, and copies of some of them."""
    generator = np.random.default_rng(0)
    words = [generator.integers(0, 500, 8).astype(np.int32) for _ in range(300)]

    def request() -> suffix_streams.Tokens:
        return np.concatenate([words[i] for i in generator.integers(0, 300, 180)])

    shown, held = [request() for _ in range(160)], [request() for _ in range(12)]
    suffix_streams.save(folder / "code", shown, held)
    copies = [document for document in shown[:20] for _ in range(suffix_streams.REVISIONS)]
    again = [document for document in shown[:20] for _ in range(suffix_streams.HELD_REVISIONS)]
    suffix_streams.save(folder / "edit", copies, again)


@pytest.mark.slow
def test_bench_runs_at_small_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_streams(tmp_path)
    sizes = bench_suffix_tree.Sizes(
        cached_tokens=40_000,
        saved_tokens=60_000,
        pieces=2,
        replays=3,
        passes=1,
        batch=4,
        steps=4,
        churn=6,
        prompt=8_192,
        loads=1,
    )
    monkeypatch.setattr(common, "PEER_PYTHON", tmp_path / "none")
    bench = common.Bench(1)
    try:
        bench_suffix_tree.measure(bench, sizes, tmp_path, (64,))
    finally:
        bench.close()
    figures = {figure.id: figure for figure in bench.figures}
    assert len(figures) == len(bench.figures)
    for id, figure in figures.items():
        assert id.startswith("suffix_tree.") and np.isfinite(figure.value)
        # Without the peer, no figure is compared with it.
        assert figure.peer in (None, "one thread")
    tokens = figures["suffix_tree.edit.64.tokens"].value
    # Copies are predicted up to the tree's depth, and further with read_on.
    assert 8 < tokens <= 65 and figures["suffix_tree.edit.64.read_on"].value > tokens
