# SPDX-License-Identifier: Apache-2.0
"""Steps split into launch and collect, and empty steps of an idle engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_config
from fake_gpu import FakeGpu
from pages import check_pages
from specops.engine import Engine, EngineConfig, EngineError, SamplingParams, SpeculativeConfig
from specops.engine.models import Transformer

NAIVE = SpeculativeConfig(method="naive")
METHODS = {
    "naive": NAIVE,
    "ngram": SpeculativeConfig.from_dict(
        {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1}
    ),
    "suffix": SpeculativeConfig(method="suffix", num_speculative_tokens=6),
    "mtp": SpeculativeConfig(method="mtp", num_speculative_tokens=3),
}
PROMPTS = [[7, 8, 9] * 6, [5, 6, 7, 5, 6, 7, 5], list(range(1, 50)), [3], [11, 12] * 20]
DEVICES = [None, False, True]  # the CPU, and a fake GPU without and with graph captures


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("model"), num_hidden_layers=2, num_nextn_predict_layers=2
    )


@pytest.fixture
def make(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    def make(method: str, captures: bool | None = None, **config: Any) -> Engine:
        if captures is not None:
            device = FakeGpu(captures=captures, poison=0x7F)
            monkeypatch.setattr("specops.engine.engine.open_device", lambda *_, **__: device)
        speculative = METHODS[method]
        options = {"device": "cpu", "load_format": "dummy", "max_num_seqs": 3, **config}
        return Engine(EngineConfig(model=str(model_dir), speculative_config=speculative, **options))

    return make


def sampling(index: int) -> SamplingParams:
    temperature = 0.0 if index % 2 else 0.8
    return SamplingParams(max_tokens=30, temperature=temperature, seed=index, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    config = {"model": str(model_dir), "load_format": "dummy", "device": "cpu"}
    engine = Engine(EngineConfig(speculative_config=NAIVE, **config))  # type: ignore[arg-type]
    done = engine.generate(PROMPTS, [sampling(i) for i in range(len(PROMPTS))])
    return [one.token_ids for one in done]


@pytest.mark.parametrize("captures", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_requests_can_be_added_and_aborted_during_a_step(
    make: Callable[..., Engine], expected: list[list[int]], method: str, captures: bool | None
) -> None:
    """Remaining requests have the tokens of plain decoding; aborted ones free their pages."""
    engine = make(method, captures)
    names: dict[str, int] = {}
    outputs_so_far: dict[str, list[int]] = {}
    aborted = []
    for step in range(400):
        if step and not engine.has_unfinished():
            break
        engine.launch()
        if step < len(PROMPTS):  # of each prompt, one request stays and one is aborted in a step
            for kind in ("stays", "goes"):
                name = engine.add_request(PROMPTS[step], sampling(step), request_id=f"{kind}{step}")
                names[name], outputs_so_far[name] = step, []
        running = [one.request_id for one in engine._scheduler.running]
        going = [one for one in running if one.startswith("goes") and len(outputs_so_far[one]) > 3]
        for name in going[:1]:
            aborted.append(name)
            assert engine.abort(name) and not engine.abort(name)
            with pytest.raises(ValueError, match="in use"):
                engine.add_request([1], sampling(0), request_id=name)
        for output in engine.collect():
            assert output.request_id not in aborted
            outputs_so_far[output.request_id] += output.token_ids
        check_pages(engine._pool)
    assert len(aborted) == len(PROMPTS) and engine.num_free_pages == engine.num_pages
    assert sorted(engine._scheduler._free_slots) == [0, 1, 2]
    for name, index in names.items():
        assert outputs_so_far[name] == expected[index][: len(outputs_so_far[name])]
        if name.startswith("stays"):
            assert engine.completion(name).token_ids == expected[index] == outputs_so_far[name]
    assert not engine._requests


def test_step_is_collected_once(make: Callable[..., Engine]) -> None:
    engine = make("ngram")
    assert engine.collect() == []
    engine.add_request(PROMPTS[0], sampling(0))
    engine.launch()
    with pytest.raises(EngineError, match="a step is under way: collect it before the next one"):
        engine.launch()
    assert engine.collect() and engine.collect() == []
    assert engine.stats.num_steps == 1


@pytest.mark.parametrize("captures", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_idle_engine_can_run_empty_steps(
    make: Callable[..., Engine],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    captures: bool | None,
) -> None:
    """Empty steps have no rows and change no state."""
    engine = make(method, captures)
    num_rows: list[int] = []
    forward = Transformer.forward

    def watched(self: Transformer, batch: Any, *args: Any) -> torch.Tensor:
        num_rows.append(int(batch.qo_indptr[-1]))
        return forward(self, batch, *args)

    for _ in range(2):  # before the first request, and after drafters have run
        assert engine.step() == []  # an idle step without `even_if_idle` runs nothing
        with monkeypatch.context() as patch:
            patch.setattr(Transformer, "forward", watched)
            for _ in range(3):
                assert engine.step(even_if_idle=True) == []
        # With captures, the second run is only recorded, and later runs are replayed.
        assert len(num_rows) == (2 if captures else 3)
        assert not any(num_rows[:1] if captures else num_rows)
        num_rows.clear()
        engine._runner.memory.forget()
        steps = engine.stats.num_steps
        done = engine.generate(PROMPTS, [sampling(i) for i in range(len(PROMPTS))])
        assert [one.token_ids for one in done] == expected
        assert engine.stats.num_steps > steps and engine.num_free_pages == engine.num_pages


def test_failure_in_launch_or_collect_ends_the_step(
    make: Callable[..., Engine], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make("ngram", False)
    for half in ("launch", "collect"):
        with monkeypatch.context() as patch:
            for index in range(3):
                engine.add_request(PROMPTS[index], sampling(index), request_id=f"{half}{index}")
            engine.step()

            def failing(*_: Any, **__: Any) -> None:
                raise RuntimeError("the device is gone")

            patch.setattr(engine._runner, half, failing)
            with pytest.raises(EngineError, match="a step failed: RuntimeError: the device is g"):
                engine.launch()
                engine.abort(f"{half}2")  # has no output if the abort comes before the failure
                engine.collect()
        assert engine.collect() == [] and not engine.has_unfinished()
        assert engine.num_free_pages == engine.num_pages and not engine._requests
    done = engine.generate(PROMPTS, [sampling(i) for i in range(len(PROMPTS))])
    assert [one.token_ids for one in done] == expected
