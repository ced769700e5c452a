# SPDX-License-Identifier: Apache-2.0
"""Devices change no bit: padded shapes, static memory and replayed graphs against plain CPU steps.

The fake GPU stands for a GPU and poisons what a step does not bring with it; the interpreter
runs the CUDA kernels; and where there is a GPU, the same is asked of it.
"""

import dataclasses
import inspect
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import simt
import specops
import torch
from checkpoints import write_config
from draft_lengths import Lengths, RandomRests
from fake_gpu import OP_MODULES, FakeGpu
from pages import check_pages
from specops.cli.serve import main
from specops.engine import (
    Completion,
    Engine,
    EngineConfig,
    EngineError,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutput,
)
from specops.engine.device import CudaDevice, Device, open_device
from specops.engine.drafters.mtp import MtpHead
from specops.engine.drafters.recurrent import RecurrentDrafter, RecurrentShape
from specops.engine.memory.step_shape import StepShape, rounded
from specops.engine.request import Request
from torch.utils._python_dispatch import TorchDispatchMode

BENCH_PROMPTS = Path(__file__).resolve().parent.parent / "bench" / "prompts"
NAIVE = SpeculativeConfig(method="naive")
NGRAM = SpeculativeConfig(
    method="ngram", num_speculative_tokens=4, min_ngram_size=1, adaptive_verification=False
)
SUFFIX = SpeculativeConfig(method="suffix", num_speculative_tokens=6, adaptive_verification=False)
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
MTP_NGRAM = SpeculativeConfig(
    method="mtp",
    mtp_strategy="with_ngram",
    num_model_steps=2,
    num_speculative_tokens=4,
    min_ngram_size=1,
)
MTP_SUFFIX = SpeculativeConfig(
    method="mtp", mtp_strategy="with_suffix", num_model_steps=1, num_speculative_tokens=4
)
METHODS = (NAIVE, NGRAM, SUFFIX, MTP, MTP_NGRAM, MTP_SUFFIX)
needs_gpu = pytest.mark.skipif(
    not (specops.has_cuda() and torch.cuda.is_available()),
    reason="needs an NVIDIA GPU and a build with CUDA kernels: make gpu-check",
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("model"), num_hidden_layers=2, num_nextn_predict_layers=2
    )


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As small as the interpreter wants it."""
    return write_config(
        tmp_path_factory.mktemp("tiny"),
        num_hidden_layers=1,
        vocab_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        num_nextn_predict_layers=1,
    )


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeGpu]:
    """Makes the device of the next engine a twin."""

    def make(**arguments: Any) -> FakeGpu:
        device = FakeGpu(**arguments)
        monkeypatch.setattr("specops.engine.engine.open_device", lambda *_, **__: device)
        return device

    return make


def make(model_dir: Path, speculative: SpeculativeConfig = NGRAM, **config: Any) -> Engine:
    config.setdefault("device", "cpu")
    return Engine(
        EngineConfig(
            model=str(model_dir), load_format="dummy", speculative_config=speculative, **config
        )
    )


# Random weights repeat themselves at temperature 0, so that drafts are found, and right; the others
# are wrong more often than not.
PROMPTS = [[7, 8, 9] * 6, [5, 6, 7, 5, 6, 7, 5], list(range(1, 50)), [3], [11, 12] * 20]
TEMPERATURES = [0.0, 0.0, 0.9, 0.0, 0.3]


def sampling(index: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens - 3 * index,
        temperature=TEMPERATURES[index],
        top_p=0.9 if index == 4 else 1.0,
        seed=index,
        ignore_eos=True,
        logprobs=(0, 2, None, 1, 0)[index],
    )


def run(engine: Engine, count: int = len(PROMPTS), max_tokens: int = 40) -> list[Completion]:
    done = engine.generate(PROMPTS[:count], [sampling(i, max_tokens) for i in range(count)])
    assert engine.num_free_pages == engine.num_pages
    return done


def bits(done: list[Completion]) -> list[Any]:
    def pack(value: float) -> bytes:
        return struct.pack("<f", value)

    return [
        (
            one.token_ids,
            [
                (pack(p.logprob), [(i, pack(value)) for i, value in p.alternatives])
                for p in one.logprobs
            ],
        )
        for one in done
    ]


def drafter_of(engine: Engine) -> RecurrentDrafter:
    drafter = engine.drafters["mtp"]
    assert isinstance(drafter, RecurrentDrafter)
    return drafter


def module_shapes(engine: Engine, captured: bool = False) -> list[RecurrentShape | None]:
    """What modules do in the steps that are kept."""
    steps = engine._runner.memory._steps.values()
    kept = [dict(one.shape.drafters) for one in steps if one.replay or not captured]
    shapes = [one.get("mtp") for one in kept]
    assert all(one is None or isinstance(one, RecurrentShape) for one in shapes)
    return shapes  # type: ignore[return-value]


def poison_model(device: FakeGpu, engine: Engine) -> None:
    """The model's activations, too, are gone between steps, and its modules'."""
    owners: list[Any] = [engine._runner.parts.model]
    if "mtp" in engine.drafters:
        head = drafter_of(engine).head
        assert isinstance(head, MtpHead)
        owners.append(head.modules)
    device.scratch += [value for owner in owners for value in owner.activations.tensors]


BUNDLED_PROMPTS = ["def add(a, b):\n    return", "import os\n\ndef main() -> None:\n"]


def agree(left: list[Completion], right: list[Completion]) -> None:
    """The same tokens while decisions are clear, and logprobs within bf16's noise."""
    for one, other in zip(left, right, strict=True):
        compared = 0
        for expected, got in zip(one.logprobs, other.logprobs, strict=False):
            if got.token_id != expected.token_id:
                margin = expected.alternatives[0][1] - expected.alternatives[1][1]
                assert margin < 0.1
                break  # a near tie: the texts part here
            assert abs(got.logprob - expected.logprob) < 0.1
            compared += 1
        assert compared > 3


# ---- shapes ----

MOST = StepShape(48, 512, 512, 511, 48 * 16)


@pytest.mark.parametrize("k", [0, 1, 2, 4, 6, 7, 10])
def test_every_size_has_a_shape_and_there_are_few(k: int) -> None:
    """Whatever the relation of k + 1 to the ladder, no size is left without a shape of its size."""
    shapes = set()
    for batch in range(1, MOST.batch + 1):
        for rows in range(batch, min(batch * (k + 1), MOST.rows) + 1):
            pages = 3 * batch
            exact = StepShape(batch, rows, rows, k, pages, proposals=k)
            shape = rounded(exact, MOST)
            assert all(got >= want for got, want in zip(shape[:5], exact[:5], strict=True))
            assert shape.rows == shape.outputs <= MOST.rows and shape.width == k
            assert shape.batch < 2 * batch and shape.batch <= MOST.batch
            assert shape.rows <= max(1.34 * rows, rows + 7)
            assert rounded(shape, MOST) == shape
            shapes.add(shape)
        if batch & (batch - 1) == 0 and batch * (k + 1) <= MOST.rows:
            # All requests with all their drafts: nothing is padded at all.
            full = StepShape(batch, batch * (k + 1), batch * (k + 1), k, 64, proposals=k)
            assert rounded(full, MOST)[:3] == full[:3]
    assert len(shapes) <= 110  # so that all of them are kept


# ---- the twin ----


@pytest.mark.parametrize("poison", [0xFF, 0x7F])
@pytest.mark.parametrize("captures", [True, False], ids=["graphs", "eager"])
def test_padding_static_memory_and_replays_change_no_bit(
    model_dir: Path, twin: Callable[..., FakeGpu], captures: bool, poison: int
) -> None:
    expected = bits(run(make(model_dir, NAIVE, max_num_seqs=1)))
    for speculative in METHODS:
        for limits in (
            {"max_num_seqs": 8},
            {"max_num_seqs": 3, "max_num_batched_tokens": 16},
            # So few pages that requests are preempted and begin anew.
            {"max_num_seqs": 5, "max_model_len": 96, "num_pages": 10},
        ):
            device = twin(captures=captures, poison=poison)
            engine = make(model_dir, speculative, **limits)
            poison_model(device, engine)
            assert bits(run(engine)) == expected
            assert (engine.num_captures > 0) == captures == ("replay" in device.log)
            assert (engine.stats.num_preemptions > 0) == ("num_pages" in limits)
            if speculative is not NAIVE:
                stats = engine.stats.speculative
                assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def everything(index: int, max_tokens: int) -> SamplingParams:
    """As `sampling`, and more; one request asks for nothing more, and the others' lists grow."""
    plain = sampling(index, max_tokens)
    if index == 3:
        return plain
    return dataclasses.replace(
        plain,
        repetition_penalty=1.1,
        presence_penalty=-0.2,
        frequency_penalty=0.05 * index,
        typical_p=1.0 if index == 1 else 0.95,
        logit_bias={token_id: 0.5 * (-1) ** token_id for token_id in range(3, 8 + 6 * index)},
        bad_words_token_ids=[[7, 9], [8]] + [[5, 6, token_id] for token_id in range(5 * index)],
        allowed_token_ids=None if index == 0 else list(range(1, 60 - index)),
        min_tokens=5 * index,
        stop_token_ids=[12, 33][: index + 1],
        stop_token_sequences=[[3, 4]] + [[1] * index, [2, 40]] * (index % 2),
        reasoning_max_tokens=10 if index == 2 else None,
        response_max_tokens=9 if index == 2 else None,
        think_end_token_id=50 if index == 2 else None,
        think_inject_token_ids=[51, 50] if index == 2 else None,
    )


@pytest.mark.parametrize("captures", [True, False], ids=["graphs", "eager"])
def test_tables_move_and_change_no_bit(
    model_dir: Path, twin: Callable[..., FakeGpu], captures: bool
) -> None:
    """Tables come and grow with the requests, under padding, replays and preemption."""

    def run_all(engine: Engine) -> list[Any]:
        each = [everything(i, 40) for i in range(len(PROMPTS))]
        done = engine.generate(PROMPTS * 2, each * 2)
        return [*bits(done), [(one.finish_reason, one.stop_reason) for one in done]]

    expected = run_all(make(model_dir, NAIVE, max_num_seqs=1))
    assert len({reason for reason, _ in expected[-1]}) == 2
    for speculative in METHODS:
        for limits in (
            {"max_num_seqs": 8},
            {"max_num_seqs": 5, "max_model_len": 96, "num_pages": 10},
        ):
            device = twin(captures=captures)
            engine = make(model_dir, speculative, **limits)
            poison_model(device, engine)
            assert run_all(engine) == expected
            assert (engine.num_captures > 0) == captures
            assert (engine.stats.num_preemptions > 0) == ("num_pages" in limits)
            if speculative in (NGRAM, SUFFIX):  # random modules are never right
                assert engine.stats.speculative.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "speculative",
    [NGRAM, dataclasses.replace(SUFFIX, num_speculative_tokens=2, num_model_steps=2), MTP],
    ids=["ngram", "suffix", "mtp"],
)
def test_a_step_is_one_copy_each_way_and_one_wait(
    model_dir: Path, twin: Callable[..., FakeGpu], speculative: SpeculativeConfig
) -> None:
    device = twin()
    engine = make(model_dir, speculative, max_num_seqs=4)
    for index in range(3):
        engine.add_request([4 + index, 5] * 5, SamplingParams(max_tokens=90, temperature=0))
    for _ in range(24):
        engine.step()
    device.log.clear()
    calls = TorchCalls()
    with calls:
        for _ in range(12):
            engine.step()
    steps = "".join(f"{word} " for word in device.log).split("wait ")[:-1]
    assert len(steps) == 12
    assert steps.count("in replay out ") >= 10, "steps of these sizes have been captured"
    assert set(steps) <= {"in replay out ", "in out ", "in capture replay out "}
    assert "allocate" not in device.log
    # Who drafts within a graph is not told apart from the rest of it.
    assert not engine.times_drafting
    assert engine.stats.verify_seconds == engine.stats.draft_seconds == 0


class TorchCalls(TorchDispatchMode):
    """Notes the torch operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "speculative",
    [NAIVE, NGRAM, SUFFIX, dataclasses.replace(MTP, num_speculative_tokens=1, num_model_steps=1)],
    ids=["naive", "ngram", "suffix", "mtp"],
)
def test_a_steady_step_calls_no_torch_operator(
    model_dir: Path, speculative: SpeculativeConfig
) -> None:
    """Neither allocations nor views: all of them were made with the shape."""
    engine = make(model_dir, speculative, max_num_seqs=2)
    # A text without repetition has no drafts, so that all steps have one shape.
    engine.add_request(list(range(1, 40)), SamplingParams(max_tokens=60, temperature=2.0, seed=1))
    for _ in range(12):
        engine.step()
    calls = TorchCalls()
    with calls:
        while engine.stats.num_steps < 20:
            before = engine.stats.speculative.num_draft_tokens
            calls.names.clear()
            engine.step()
            if engine.stats.speculative.num_draft_tokens == before:
                assert calls.names == []


def test_modules_that_catch_up_after_a_rest_fit_their_arrays(
    model_dir: Path, twin: Callable[..., FakeGpu]
) -> None:
    """As many rows as ever run again, in a shape that is rounded up."""
    prompts, params = [[n, n + 1] for n in range(1, 41)], SamplingParams(max_tokens=30, seed=1)
    limits = {"max_num_seqs": 40, "max_num_batched_tokens": 40}
    expected = bits(make(model_dir, NAIVE, **limits).generate(prompts, params))
    twin()
    engine = make(model_dir, MTP, **limits)

    class Rests(Lengths):
        def limit(self, request: Request) -> int:
            return super().limit(request) * (engine.stats.num_steps % 9 > 5)

    Rests().decide_for(engine)
    assert bits(engine.generate(prompts, params)) == expected
    longest = max(one.rows for one in module_shapes(engine) if one is not None)
    assert longest == drafter_of(engine).max_rows


@pytest.mark.parametrize("page_size", [16, 64])
def test_modules_that_begin_anew_after_a_long_rest_are_replayed(
    model_dir: Path, twin: Callable[..., FakeGpu], page_size: int
) -> None:
    """Some requests' modules skip pages and others' do not, in steps that are padded."""
    prompts, params = [[n, n + 1] for n in range(1, 6)], SamplingParams(max_tokens=140, seed=1)
    limits = {"max_num_seqs": 5, "page_size": page_size}
    expected = bits(make(model_dir, NAIVE, **limits).generate(prompts, params))
    device = twin()
    engine = make(model_dir, MTP, **limits)
    poison_model(device, engine)

    class Rests(Lengths):
        def limit(self, request: Request) -> int:
            rests = not request.arrival % 2 and 20 < len(request.token_ids) < 110
            return 0 if rests else super().limit(request)

    Rests().decide_for(engine)
    assert bits(engine.generate(prompts, params)) == expected
    assert any(shape.skips_pages for shape in module_shapes(engine) if shape is not None)
    assert device.log.count("replay") > 50


def test_rests_at_random_are_replayed(model_dir: Path, twin: Callable[..., FakeGpu]) -> None:
    """Long rests of all, and short ones of some."""
    prompts, params = [[n, n + 1] for n in range(1, 6)], SamplingParams(max_tokens=240, seed=1)
    limits = {"max_num_seqs": 5, "max_model_len": 256}
    expected = bits(make(model_dir, NAIVE, **limits).generate(prompts, params))
    device = twin()
    engine = make(model_dir, MTP, **limits)
    poison_model(device, engine)
    lengths = RandomRests()
    lengths.decide_for(engine)
    assert bits(engine.generate(prompts, params)) == expected
    shapes = [one for one in module_shapes(engine, captured=True) if one is not None]
    assert {one.rows > 0 for one in shapes} == {True, False}
    assert lengths.num_suspended > 50
    assert engine.stats.speculative.num_accepted_tokens > 0


def test_memory_that_grows_drops_what_was_captured(
    model_dir: Path, twin: Callable[..., FakeGpu]
) -> None:
    expected = bits(run(make(model_dir, NAIVE)))
    device = twin()
    engine = make(model_dir, NAIVE, max_num_seqs=8)
    assert bits(run(engine)) == expected
    before = engine.num_captures
    memory = engine._runner.memory
    for name in ("exchange", "scratch", "workspace", "sums"):
        memory.block(name, 2 * memory.block(name, 1).device.numel())
    assert bits(run(engine)) == expected
    assert engine.num_captures > before
    assert device.log.count("replay") > 10


def test_requests_with_their_own_number_of_drafts(
    model_dir: Path, twin: Callable[..., FakeGpu]
) -> None:
    """A wider draft than the engine's own widens the arrays of all, while others run."""
    (want,) = make(model_dir, NAIVE).generate([PROMPTS[0]], sampling(0, 60))
    twin()
    engine = make(model_dir, NGRAM)
    first = engine.add_request(PROMPTS[0], sampling(0, 60))
    for _ in range(6):
        engine.step()
    wide = {"method": "ngram", "num_speculative_tokens": 9, "min_ngram_size": 1}
    second = engine.add_request(PROMPTS[0], sampling(0, 60), speculative_config=wide)
    plain = engine.add_request(PROMPTS[0], sampling(0, 60), speculative_config={"method": "naive"})
    while engine.has_unfinished():
        engine.step()
    for name in (first, second, plain):
        assert engine.completion(name).token_ids == want.token_ids
    assert len(engine.stats.speculative.num_accepted_tokens_per_pos) == 9


# ---- the interpreter ----


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CUDA kernels in the place of the CPU's."""
    module = simt.load()
    module.set_schedule("in_order", 0)
    module.set_landing("late")
    for op_module in OP_MODULES:
        monkeypatch.setattr(op_module, "_C", module)
    yield


def test_cuda_kernels_in_the_interpreter(
    tiny_dir: Path, interpreter: None, twin: Callable[..., FakeGpu]
) -> None:
    """Every method, chunks and graphs: every token and logprob is the same."""
    results = []
    for speculative, captures, limits in (
        (NAIVE, False, {"max_num_seqs": 1}),
        (NGRAM, True, {"max_num_seqs": 3}),
        (NGRAM, False, {"max_num_seqs": 2, "max_num_batched_tokens": 8, "page_size": 32}),
        (SUFFIX, True, {"max_num_seqs": 3}),
        (MTP, True, {"max_num_seqs": 3}),
        (MTP_NGRAM, False, {"max_num_seqs": 2, "max_num_batched_tokens": 8}),
        (MTP_SUFFIX, True, {"max_num_seqs": 2}),
    ):
        device = twin(captures=captures)
        engine = make(tiny_dir, speculative, **limits)
        poison_model(device, engine)
        results.append(bits(run(engine, count=2, max_tokens=12)))
        assert (engine.num_captures > 0) == captures
        if "mtp" in speculative.stages:  # random modules are seldom right
            assert engine.stats.speculative.num_draft_tokens > 0
        elif speculative is not NAIVE:
            assert engine.stats.speculative.num_accepted_tokens > 0
    for other in results[1:]:
        assert other == results[0]


def test_weights_as_codes_in_the_interpreter(
    tiny_dir: Path, interpreter: None, twin: Callable[..., FakeGpu]
) -> None:
    """Of 4 bits, drafted for or not."""
    results = []
    for speculative in (NAIVE, NGRAM, MTP):
        device = twin(captures=speculative is NGRAM)
        engine = make(tiny_dir, speculative, max_num_seqs=2, quantization="wint4")
        poison_model(device, engine)
        results.append(bits(run(engine, count=2, max_tokens=8)))
        assert speculative is NAIVE or engine.stats.speculative.num_draft_tokens > 0
    assert results[0] == results[1] == results[2]


def test_all_parameters_in_the_interpreter(
    tiny_dir: Path, interpreter: None, twin: Callable[..., FakeGpu]
) -> None:
    """Tables, counts kept by the device and rows that count drafts, through the CUDA kernels."""
    results = []
    for speculative, captures, limits in (
        (NAIVE, False, {"max_num_seqs": 1}),
        (NGRAM, True, {"max_num_seqs": 3}),
    ):
        device = twin(captures=captures)
        engine = make(tiny_dir, speculative, **limits)
        poison_model(device, engine)
        each = [everything(i, 20) for i in range(3)]
        results.append(bits(engine.generate(PROMPTS[:3], each)))
    assert engine.stats.speculative.num_accepted_tokens > 0
    assert results[1] == results[0]


def test_logprobs_of_prompts_in_the_interpreter(
    tiny_dir: Path, interpreter: None, twin: Callable[..., FakeGpu]
) -> None:
    """Those of chunks equal those of generated tokens, through the CUDA kernels."""
    device = twin(captures=True)
    engine = make(tiny_dir, NGRAM, max_num_seqs=2, max_num_batched_tokens=8)
    poison_model(device, engine)
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)
    done = engine.generate(PROMPTS[:2], params)
    prompts = [one.prompt_token_ids + one.token_ids for one in done]
    scored = engine.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=2))
    for one, again in zip(done, scored, strict=True):
        assert again.prompt_logprobs is not None
        assert list(again.prompt_logprobs)[len(one.prompt_token_ids) :] == one.logprobs


def test_masks_in_the_interpreter(
    tiny_dir: Path, interpreter: None, twin: Callable[..., FakeGpu]
) -> None:
    """Constrained rows and free ones, through the CUDA kernels; with forced tokens."""
    pytest.importorskip("llguidance")
    suffix = SpeculativeConfig(
        method="suffix", num_speculative_tokens=4, suffix_decoding_max_spec_factor=4.0
    )
    results = []
    for speculative, captures, limits in (
        (NAIVE, False, {"max_num_seqs": 1}),
        (NGRAM, True, {"max_num_seqs": 3}),
        (suffix, False, {"max_num_seqs": 2}),
    ):
        device = twin(captures=captures)
        engine = make(tiny_dir, speculative, **limits)
        poison_model(device, engine)
        each = [sampling(i, 16) for i in range(3)]
        for index, regex in enumerate(("[A-D]{2,6}(,[0-9]+)*", "FIXED:[0-9]{9}")):
            wanted = StructuredOutput(regex=regex)
            each[index] = dataclasses.replace(each[index], structured_output=wanted)
        done = engine.generate(PROMPTS[:3], each)
        results.append([*bits(done), [one.finish_reason for one in done]])
    assert engine.stats.speculative.num_accepted_tokens > 0
    assert results[1] == results[0] and results[2] == results[0]


@pytest.mark.parametrize(
    "drafter,strategy",
    [
        *[(NGRAM, strategy) for strategy in ("greedy", "rejection", "block", "topp")],
        *[(MTP, strategy) for strategy in ("rejection", "block")],
    ],
    ids=lambda one: one if isinstance(one, str) else one.method,
)
def test_strategies_in_the_interpreter(
    tiny_dir: Path,
    interpreter: None,
    twin: Callable[..., FakeGpu],
    drafter: SpeculativeConfig,
    strategy: str,
) -> None:
    """A seeded text is the same alone and among others, eager and replayed."""
    speculative = dataclasses.replace(drafter, verify_strategy=strategy)
    each = [everything(i, 20) for i in range(3)]
    results = []
    for captures, limits in ((False, {"max_num_seqs": 1}), (True, {"max_num_seqs": 3})):
        device = twin(captures=captures)
        engine = make(tiny_dir, speculative, **limits)
        poison_model(device, engine)
        results.append(bits(engine.generate(PROMPTS[:3], each)))
    assert results[1] == results[0]
    stats = engine.stats.speculative
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("model", simt.ACCUMULATIONS)
def test_cuda_kernels_under_any_rounding(
    tiny_dir: Path, interpreter: None, twin: Callable[..., FakeGpu], model: str
) -> None:
    """More requests and tokens, random schedules, and every rule by which mma may round."""
    simt.load().set_schedule("random", 5)
    simt.load().set_landing("random")
    results = []
    with simt.accumulation(model):
        for speculative, captures, limits in (
            (NAIVE, False, {"max_num_seqs": 1, "enable_prefix_caching": False}),
            (NAIVE, True, {"max_num_seqs": 5}),
            (NGRAM, True, {"max_num_seqs": 5}),
            (NGRAM, True, {"max_num_seqs": 3, "max_num_batched_tokens": 12, "page_size": 64}),
            (NGRAM, False, {"max_num_seqs": 4, "num_pages": 7}),
            (SUFFIX, True, {"max_num_seqs": 5}),
            (MTP, True, {"max_num_seqs": 5}),
            (MTP_NGRAM, True, {"max_num_seqs": 3, "max_num_batched_tokens": 12}),
            (MTP, False, {"max_num_seqs": 4, "num_pages": 7}),
        ):
            device = twin(captures=captures, poison=0x7F)
            engine = make(tiny_dir, speculative, **limits)
            poison_model(device, engine)
            results.append(bits(run(engine, max_tokens=24)))
    for other in results[1:]:
        assert other == results[0]


@pytest.mark.ci
def test_the_bundled_model_in_the_interpreter(
    twin: Callable[..., FakeGpu], request: pytest.FixtureRequest
) -> None:
    """As on the CPU within rounding; plain and with drafts, bit for bit."""
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2, ignore_eos=True)
    cpu = Engine(EngineConfig(device="cpu")).generate(BUNDLED_PROMPTS, params)
    request.getfixturevalue("interpreter")
    results = []
    for speculative in (NAIVE, NGRAM, MTP):
        twin()
        engine = Engine(EngineConfig(speculative_config=speculative, max_model_len=256))
        results.append(engine.generate(BUNDLED_PROMPTS, params))
    agree(cpu, results[0])
    assert bits(results[1]) == bits(results[0]) == bits(results[2])
    assert engine.stats.speculative.num_accepted_tokens > 0


def test_states_of_prefixes_on_the_device(
    tmp_path: Path, interpreter: None, twin: Callable[..., FakeGpu]
) -> None:
    """Linear attention goes on from what an earlier request has left, between graphs as well."""
    write_config(
        tmp_path,
        architectures=["Qwen3_5ForCausalLM"],
        layer_types=["linear_attention", "full_attention"],
        num_hidden_layers=2,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
    )
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    prompts = [list(range(1, 40)), list(range(1, 40)), [*range(1, 36), 9, 9]]
    want = None
    # It is its own draft model, and always right.
    own = SpeculativeConfig(method="draft_model", model=str(tmp_path), num_speculative_tokens=3)
    for speculative, caching in ((NAIVE, False), (NGRAM, True), (own, True)):
        twin(captures=caching)
        engine = make(tmp_path, speculative, max_num_seqs=2, enable_prefix_caching=caching)
        done = [engine.generate([prompt], params)[0] for prompt in prompts]
        assert [one.num_cached_tokens for one in done] == ([0, 32, 32] if caching else [0] * 3)
        want = want or bits(done)
        assert bits(done) == want
    spec = engine.stats.speculative
    assert spec.num_accepted_tokens == spec.num_draft_tokens > 10


def test_faults_of_cuda_kernels_come_with_the_results(
    tiny_dir: Path, interpreter: None, twin: Callable[..., FakeGpu]
) -> None:
    twin()
    engine = make(tiny_dir, NAIVE)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    name = engine.add_request([1, 2, 3], params)
    engine.step()
    request = engine._requests[name]
    request.token_ids[-1] = 64  # of a vocabulary of 64
    with pytest.raises(EngineError, match="a step failed: embedding: token_ids"):
        engine.step()


# ---- faults and names ----


def test_faults_on_cpu(model_dir: Path) -> None:
    """A failed step ends its requests, leaves nothing behind, and the others go on."""
    for speculative in (NAIVE, NGRAM, SUFFIX, MTP_SUFFIX):
        engine = make(model_dir, speculative, max_num_seqs=2)
        params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
        names = [engine.add_request([1, 2, 3 + index], params) for index in range(3)]
        engine.step()
        engine._requests[names[1]].token_ids[-1] = engine.vocab_size
        with pytest.raises(EngineError, match=r"a step failed: embedding: token_ids\[\d\] must be"):
            engine.step()
        assert not any(engine.abort(name) for name in names[:2])
        while engine.has_unfinished():  # the one that waited
            engine.step()
        assert (
            engine.completion(names[2]).token_ids
            == engine.generate([[1, 2, 5]], params)[0].token_ids
        )
        assert engine.num_free_pages == engine.num_pages
        check_pages(engine._pool)


def test_device_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert type(open_device("cpu")) is Device
    for name in ("gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "cuda:²"):
        with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:N, got"):
            open_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert type(open_device("auto")) is Device
    for has_cuda, reason in ((False, "this build has no CUDA kernels"), (True, "no NVIDIA GPU")):
        monkeypatch.setattr(specops, "has_cuda", lambda has=has_cuda: has)
        with pytest.raises(ValueError, match=f"device cuda:3 cannot be used: .*{reason}"):
            open_device("cuda:3")
    assert main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("specops: device cuda cannot be used: ")


def test_gpus_that_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specops, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(ValueError, match="cuda:1 cannot be used: there is 1 GPU, counted from 0"):
        open_device("cuda:1")
    with pytest.raises(ValueError, match=r"capability is 7\.5, and the kernels need 8\.0"):
        open_device("cuda")
    assert type(open_device("auto")) is Device


class FakeCuda:
    """torch.cuda without a GPU: the calls that a CUDA device makes, by torch's own signatures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fail_at = ""
        fake = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.name = "side" if device is not None else "current"

            def wait_stream(self, stream: "Stream") -> None:
                fake.note(f"{self.name} waits for {stream.name}")

        class Event:
            def record(self, stream: Stream) -> None:
                fake.note(f"record on {stream.name}")

            def synchronize(self) -> None:
                fake.note("synchronize")

        begins_with = inspect.signature(torch.cuda.CUDAGraph.capture_begin)

        class Graph:
            def capture_begin(self, *args: Any, **kwargs: Any) -> None:
                bound = begins_with.bind(self, *args, **kwargs)
                del bound.arguments["self"]
                assert bound.arguments == {"pool": "pool", "capture_error_mode": "thread_local"}
                fake.note("begin")

            def capture_end(self) -> None:
                fake.note("end")

            def replay(self) -> None:
                fake.note("replay")

        @contextmanager
        def on_stream(stream: Stream) -> Iterator[None]:
            fake.note(f"on {stream.name}")
            yield
            fake.note("off")

        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "current_stream": lambda device: Stream(),
            "stream": on_stream,
            "device": lambda device: nullcontext(),
            "graph_pool_handle": lambda: "pool",
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail_at:
            raise RuntimeError(f"{call} failed")


def test_captures_go_to_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    device = CudaDevice(0, graphs=True)
    replay = device.capture(lambda: cuda.note("launch"))
    captured = ["on side", "begin", "launch", "end", "off"]
    assert cuda.calls == ["side waits for current", *captured, "current waits for side"]
    cuda.calls.clear()
    replay()
    device.wait()
    assert cuda.calls == ["replay", "record on current", "synchronize"]


@pytest.mark.parametrize("fail_at", ["begin", "launch", "end"])
def test_a_capture_that_fails_says_so(monkeypatch: pytest.MonkeyPatch, fail_at: str) -> None:
    cuda = FakeCuda(monkeypatch)
    device = CudaDevice(0, graphs=True)
    cuda.fail_at = fail_at
    with pytest.raises(EngineError, match=f"graph: {fail_at} failed; --enforce-eager"):
        device.capture(lambda: cuda.note("launch"))
    assert ("end" in cuda.calls) == (fail_at != "begin")


def test_pages_must_fit_the_memory(model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"num_pages must fit the memory of cpu: 10000000000 "):
        make(model_dir, num_pages=10**10)


def test_random_weights_need_no_checkpoint(model_dir: Path) -> None:
    first, second = make(model_dir), make(model_dir)
    assert bits(run(first)) == bits(run(second))
    assert not list(model_dir.glob("*.safetensors"))


# ---- a GPU ----


@needs_gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_lossless_on_a_gpu(model_dir: Path, eager: bool) -> None:
    expected = bits(run(make(model_dir, NAIVE, max_num_seqs=1, device="cuda", enforce_eager=True)))
    for speculative, limits in (
        (NGRAM, {"max_num_seqs": 8}),
        (NGRAM, {"max_num_seqs": 3, "max_num_batched_tokens": 16}),
        (SUFFIX, {"max_num_seqs": 8}),
    ):
        engine = make(model_dir, speculative, device="cuda", enforce_eager=eager, **limits)
        assert bits(run(engine)) == expected
        assert (engine.num_captures > 0) != eager
        assert engine.stats.speculative.num_accepted_tokens > 0


@needs_gpu
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_all_parameters_on_a_gpu(model_dir: Path, mode: str) -> None:
    each = [everything(i, 40) for i in range(len(PROMPTS))] * 2
    results = []
    for speculative, limits in (
        (NAIVE, {"max_num_seqs": 1, "enforce_eager": True}),
        (NGRAM, {"max_num_seqs": 8}),
        (NGRAM, {"max_num_seqs": 5, "max_model_len": 96, "num_pages": 10}),
    ):
        engine = make(model_dir, speculative, device="cuda", logprobs_mode=mode, **limits)
        results.append(bits(engine.generate(PROMPTS * 2, each)))
        assert (engine.stats.num_preemptions > 0) == ("num_pages" in limits)
    assert engine.num_captures > 0
    assert results[1] == results[0]
    assert results[2] == results[0]


@needs_gpu
def test_the_bundled_model_on_a_gpu() -> None:
    """The same text as on the CPU while decisions are clear, and logprobs within bf16's noise."""
    params = SamplingParams(max_tokens=48, temperature=0, logprobs=2)
    outputs = [
        Engine(EngineConfig(device=name)).generate(BUNDLED_PROMPTS, params)
        for name in ("cpu", "cuda")
    ]
    agree(*outputs)


@needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_bundled_model_is_lossless_on_a_gpu(temperature: float) -> None:
    prompts = json.loads((BENCH_PROMPTS / "edits.json").read_text())[:12]
    each = [
        SamplingParams(max_tokens=96, temperature=temperature, seed=i, logprobs=1, ignore_eos=True)
        for i in range(len(prompts))
    ]
    results = []
    for speculative, limits in (
        (NAIVE, {"max_num_seqs": 1, "enforce_eager": True}),
        (NGRAM, {"max_num_seqs": 12}),
        (NGRAM, {"max_num_seqs": 5, "max_num_batched_tokens": 32, "page_size": 64}),
    ):
        engine = Engine(EngineConfig(device="cuda", speculative_config=speculative, **limits))
        results.append(bits(engine.generate([prompt["text"] for prompt in prompts], each)))
        if speculative is NGRAM:
            stats = engine.stats.speculative
            assert engine.num_captures and 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert results[1] == results[0]
    assert results[2] == results[0]


@needs_gpu
def test_a_large_model_on_a_gpu(tmp_path: Path) -> None:
    """The shape of Qwen3-8B with random weights: n-gram drafts, graphs and eager agree."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    write_config(
        tmp_path,
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
    )
    results = []
    for speculative, eager in ((NAIVE, True), (NAIVE, False), (NGRAM, False)):
        engine = make(
            tmp_path,
            speculative,
            device="cuda",
            enforce_eager=eager,
            max_num_seqs=8,
            kv_cache_bytes=2 << 30,
        )
        results.append(bits(run(engine, max_tokens=32)))
        del engine
        torch.cuda.empty_cache()
    assert results[1] == results[0]
    assert results[2] == results[0]
