# SPDX-License-Identifier: Apache-2.0
"""Padded shapes, static memory and replayed graphs give the bits of plain CPU steps.

The fake GPU poisons all memory that a step does not copy. The interpreter runs the CUDA kernels.
Where there is a GPU, tests run on it as well.
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
NGRAM = SpeculativeConfig.from_dict(
    {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "min_ngram_size": 1,
        "adaptive_verification": False,
    }
)
SUFFIX = SpeculativeConfig(method="suffix", num_speculative_tokens=6, adaptive_verification=False)
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
MTP_NGRAM = SpeculativeConfig.from_dict(
    {"method": "mtp+ngram", "num_model_steps": 2, "num_speculative_tokens": 4, "min_ngram_size": 1}
)
MTP_SUFFIX = SpeculativeConfig(method="mtp+suffix", num_model_steps=1, num_speculative_tokens=4)
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
    """Write a model that is small enough for the interpreter."""
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
def use_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeGpu]:
    """Return a function that makes the next engine use a fake GPU."""

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


# Random models repeat themselves at temperature 0, so drafts are often right. At other temperatures
# they are mostly wrong.
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
    """Return the shapes of the MTP modules in the cached steps."""
    steps = engine._runner.memory._steps.values()
    shapes_by_drafter = [dict(one.shape.drafters) for one in steps if one.replay or not captured]
    shapes = [one.get("mtp") for one in shapes_by_drafter]
    assert all(one is None or isinstance(one, RecurrentShape) for one in shapes)
    return shapes  # type: ignore[return-value]


def poison_model(device: FakeGpu, engine: Engine) -> None:
    """Poison the activations of the model and its modules between steps, too."""
    owners: list[Any] = [engine._runner.parts.model]
    if "mtp" in engine.drafters:
        head = drafter_of(engine).head
        assert isinstance(head, MtpHead)
        owners.append(head.modules)
    device.scratch += [value for owner in owners for value in owner.activations.tensors]


BUNDLED_PROMPTS = ["def add(a, b):\n    return", "import os\n\ndef main() -> None:\n"]


def assert_close_outputs(left: list[Completion], right: list[Completion]) -> None:
    """Check that tokens are equal up to near ties, and logprobs up to the noise of bf16."""
    for one, other in zip(left, right, strict=True):
        compared = 0
        for expected, got in zip(one.logprobs, other.logprobs, strict=False):
            if got.token_id != expected.token_id:
                margin = expected.alternatives[0][1] - expected.alternatives[1][1]
                assert margin < 0.1
                break  # a near tie: the texts differ from here on
            assert abs(got.logprob - expected.logprob) < 0.1
            compared += 1
        assert compared > 3


# ---- shapes ----

MOST = StepShape(48, 512, 512, 511, 48 * 16)


@pytest.mark.parametrize("k", [0, 1, 2, 4, 6, 7, 10])
def test_sizes_round_up_to_few_shapes(k: int) -> None:
    """Every size has a shape that is not much larger, for any number of drafts."""
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
            # A full batch of a power of two with all drafts needs no padding.
            full = StepShape(batch, batch * (k + 1), batch * (k + 1), k, 64, proposals=k)
            assert rounded(full, MOST)[:3] == full[:3]
    assert len(shapes) <= 110  # all shapes fit in the cache


# ---- the fake GPU ----


@pytest.mark.parametrize("poison", [0xFF, 0x7F])
@pytest.mark.parametrize("captures", [True, False], ids=["graphs", "eager"])
@pytest.mark.fast("graphs-127", "eager-255")
def test_padding_static_memory_and_replays_change_no_bit(
    model_dir: Path, use_fake_gpu: Callable[..., FakeGpu], captures: bool, poison: int
) -> None:
    expected = bits(run(make(model_dir, NAIVE, max_num_seqs=1)))
    for speculative in METHODS:
        for limits in (
            {"max_num_seqs": 8},
            {"max_num_seqs": 3, "max_num_batched_tokens": 16},
            # Few pages, so that requests are preempted.
            {"max_num_seqs": 5, "max_model_len": 96, "num_pages": 10},
        ):
            device = use_fake_gpu(captures=captures, poison=poison)
            engine = make(model_dir, speculative, **limits)
            poison_model(device, engine)
            assert bits(run(engine)) == expected
            assert (engine.num_captures > 0) == captures == ("replay" in device.log)
            assert (engine.stats.num_preemptions > 0) == ("num_pages" in limits)
            if speculative is not NAIVE:
                stats = engine.stats.speculative
                assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def all_params(index: int, max_tokens: int) -> SamplingParams:
    """Return the parameters of `sampling`, with all other parameters set, too.

    Lists grow with the request's index. Request 3 has no further parameters.
    """
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
def test_growing_tables_change_no_bit(
    model_dir: Path, use_fake_gpu: Callable[..., FakeGpu], captures: bool
) -> None:
    """Tables are added and grow with padding, replays and preemption."""

    def run_all(engine: Engine) -> list[Any]:
        each = [all_params(i, 40) for i in range(len(PROMPTS))]
        done = engine.generate(PROMPTS * 2, each * 2)
        return [*bits(done), [(one.finish_reason, one.stop_reason) for one in done]]

    expected = run_all(make(model_dir, NAIVE, max_num_seqs=1))
    assert len({reason for reason, _ in expected[-1]}) == 2
    for speculative in METHODS:
        for limits in (
            {"max_num_seqs": 8},
            {"max_num_seqs": 5, "max_model_len": 96, "num_pages": 10},
        ):
            device = use_fake_gpu(captures=captures)
            engine = make(model_dir, speculative, **limits)
            poison_model(device, engine)
            assert run_all(engine) == expected
            assert (engine.num_captures > 0) == captures
            assert (engine.stats.num_preemptions > 0) == ("num_pages" in limits)
            if speculative in (NGRAM, SUFFIX):  # drafts of random modules are always wrong
                assert engine.stats.speculative.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "speculative",
    [NGRAM, dataclasses.replace(SUFFIX, num_speculative_tokens=2, num_model_steps=2), MTP],
    ids=["ngram", "suffix", "mtp"],
)
def test_step_has_one_copy_each_way_and_one_wait(
    model_dir: Path, use_fake_gpu: Callable[..., FakeGpu], speculative: SpeculativeConfig
) -> None:
    device = use_fake_gpu()
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
    assert steps.count("in replay out ") >= 10, "steps of these sizes must be captured already"
    assert set(steps) <= {"in replay out ", "in out ", "in capture replay out "}
    assert "allocate" not in device.log
    # Drafting inside a graph is not timed separately.
    assert not engine.times_drafting
    assert engine.stats.verify_seconds == engine.stats.draft_seconds == 0


class TorchCalls(TorchDispatchMode):
    """Record of the torch operators that are called."""

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
def test_steady_step_calls_no_torch_operator(
    model_dir: Path, speculative: SpeculativeConfig
) -> None:
    """All tensors and views are created together with the step's shape."""
    engine = make(model_dir, speculative, max_num_seqs=2)
    # A text without repetition has no drafts, so all steps have one shape.
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


def test_modules_catch_up_after_a_pause_within_their_arrays(
    model_dir: Path, use_fake_gpu: Callable[..., FakeGpu]
) -> None:
    """The maximum number of rows runs again, in a shape that is rounded up."""
    prompts, params = [[n, n + 1] for n in range(1, 41)], SamplingParams(max_tokens=30, seed=1)
    limits = {"max_num_seqs": 40, "max_num_batched_tokens": 40}
    expected = bits(make(model_dir, NAIVE, **limits).generate(prompts, params))
    use_fake_gpu()
    engine = make(model_dir, MTP, **limits)

    class Pauses(Lengths):
        def limit(self, request: Request) -> int:
            return super().limit(request) * (engine.stats.num_steps % 9 > 5)

    Pauses().decide_for(engine)
    assert bits(engine.generate(prompts, params)) == expected
    longest = max(one.rows for one in module_shapes(engine) if one is not None)
    assert longest == drafter_of(engine).max_rows


@pytest.mark.parametrize("page_size", [16, 64])
def test_modules_restart_after_a_long_pause_in_graphs(
    model_dir: Path, use_fake_gpu: Callable[..., FakeGpu], page_size: int
) -> None:
    """Modules that missed many tokens leave out the pages of these tokens, in padded steps, too."""
    prompts, params = [[n, n + 1] for n in range(1, 6)], SamplingParams(max_tokens=140, seed=1)
    limits = {"max_num_seqs": 5, "page_size": page_size}
    expected = bits(make(model_dir, NAIVE, **limits).generate(prompts, params))
    device = use_fake_gpu()
    engine = make(model_dir, MTP, **limits)
    poison_model(device, engine)

    class Pauses(Lengths):
        def limit(self, request: Request) -> int:
            pauses = not request.arrival % 2 and 20 < len(request.token_ids) < 110
            return 0 if pauses else super().limit(request)

    Pauses().decide_for(engine)
    assert bits(engine.generate(prompts, params)) == expected
    assert any(shape.skips_pages for shape in module_shapes(engine) if shape is not None)
    assert device.log.count("replay") > 50


def test_random_pauses_change_no_bit_in_graphs(
    model_dir: Path, use_fake_gpu: Callable[..., FakeGpu]
) -> None:
    """Drafting stops at random: for one request in a step, or for all for up to 40 steps."""
    prompts, params = [[n, n + 1] for n in range(1, 6)], SamplingParams(max_tokens=240, seed=1)
    limits = {"max_num_seqs": 5, "max_model_len": 256}
    expected = bits(make(model_dir, NAIVE, **limits).generate(prompts, params))
    device = use_fake_gpu()
    engine = make(model_dir, MTP, **limits)
    poison_model(device, engine)
    lengths = RandomRests()
    lengths.decide_for(engine)
    assert bits(engine.generate(prompts, params)) == expected
    shapes = [one for one in module_shapes(engine, captured=True) if one is not None]
    assert {one.rows > 0 for one in shapes} == {True, False}
    assert lengths.num_suspended > 50
    assert engine.stats.speculative.num_accepted_tokens > 0


def test_growing_memory_drops_captured_graphs(
    model_dir: Path, use_fake_gpu: Callable[..., FakeGpu]
) -> None:
    expected = bits(run(make(model_dir, NAIVE)))
    device = use_fake_gpu()
    engine = make(model_dir, NAIVE, max_num_seqs=8)
    assert bits(run(engine)) == expected
    before = engine.num_captures
    memory = engine._runner.memory
    for name in ("arrays", "scratch", "workspace", "sums"):
        memory.buffer(name, 2 * memory.buffer(name, 1).device.numel())
    assert bits(run(engine)) == expected
    assert engine.num_captures > before
    assert device.log.count("replay") > 10


def test_requests_can_have_more_drafts_than_the_engines_default(
    model_dir: Path, use_fake_gpu: Callable[..., FakeGpu]
) -> None:
    """The arrays of all requests become wider while other requests run."""
    (want,) = make(model_dir, NAIVE).generate([PROMPTS[0]], sampling(0, 60))
    use_fake_gpu()
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
    """Replace the CPU kernels by the CUDA kernels in the interpreter."""
    module = simt.load()
    module.set_schedule("in_order", 0)
    module.set_landing("late")
    for op_module in OP_MODULES:
        monkeypatch.setattr(op_module, "_C", module)
    yield


def test_cuda_kernels_change_no_bit_in_the_interpreter(
    tiny_dir: Path, interpreter: None, use_fake_gpu: Callable[..., FakeGpu]
) -> None:
    """Engines differ in method, chunks and graphs."""
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
        device = use_fake_gpu(captures=captures)
        engine = make(tiny_dir, speculative, **limits)
        poison_model(device, engine)
        results.append(bits(run(engine, count=2, max_tokens=12)))
        assert (engine.num_captures > 0) == captures
        if "mtp" in speculative.stages:  # drafts of random modules are rarely right
            assert engine.stats.speculative.num_draft_tokens > 0
        elif speculative is not NAIVE:
            assert engine.stats.speculative.num_accepted_tokens > 0
    for other in results[1:]:
        assert other == results[0]


def test_quantized_weights_change_no_bit_in_the_interpreter(
    tiny_dir: Path, interpreter: None, use_fake_gpu: Callable[..., FakeGpu]
) -> None:
    results = []
    for speculative in (NAIVE, NGRAM, MTP):
        device = use_fake_gpu(captures=speculative is NGRAM)
        engine = make(tiny_dir, speculative, max_num_seqs=2, quantization="wint4")
        poison_model(device, engine)
        results.append(bits(run(engine, count=2, max_tokens=8)))
        assert speculative is NAIVE or engine.stats.speculative.num_draft_tokens > 0
    assert results[0] == results[1] == results[2]


def test_all_parameters_change_no_bit_in_the_interpreter(
    tiny_dir: Path, interpreter: None, use_fake_gpu: Callable[..., FakeGpu]
) -> None:
    """CUDA kernels update the tables and count tokens, including drafts."""
    results = []
    for speculative, captures, limits in (
        (NAIVE, False, {"max_num_seqs": 1}),
        (NGRAM, True, {"max_num_seqs": 3}),
    ):
        device = use_fake_gpu(captures=captures)
        engine = make(tiny_dir, speculative, **limits)
        poison_model(device, engine)
        each = [all_params(i, 20) for i in range(3)]
        results.append(bits(engine.generate(PROMPTS[:3], each)))
    assert engine.stats.speculative.num_accepted_tokens > 0
    assert results[1] == results[0]


def test_prompt_logprobs_are_exact_in_the_interpreter(
    tiny_dir: Path, interpreter: None, use_fake_gpu: Callable[..., FakeGpu]
) -> None:
    """Logprobs of prompt chunks equal those of generated tokens."""
    device = use_fake_gpu(captures=True)
    engine = make(tiny_dir, NGRAM, max_num_seqs=2, max_num_batched_tokens=8)
    poison_model(device, engine)
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)
    done = engine.generate(PROMPTS[:2], params)
    prompts = [one.prompt_token_ids + one.token_ids for one in done]
    scored = engine.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=2))
    for one, again in zip(done, scored, strict=True):
        assert again.prompt_logprobs is not None
        assert list(again.prompt_logprobs)[len(one.prompt_token_ids) :] == one.logprobs


def test_grammar_masks_change_no_bit_in_the_interpreter(
    tiny_dir: Path, interpreter: None, use_fake_gpu: Callable[..., FakeGpu]
) -> None:
    """Steps have constrained and free rows, and forced tokens."""
    pytest.importorskip("llguidance")
    suffix = SpeculativeConfig.from_dict(
        {
            "method": "suffix",
            "num_speculative_tokens": 4,
            "suffix_decoding_max_spec_factor": 4.0,
        }
    )
    results = []
    for speculative, captures, limits in (
        (NAIVE, False, {"max_num_seqs": 1}),
        (NGRAM, True, {"max_num_seqs": 3}),
        (suffix, False, {"max_num_seqs": 2}),
    ):
        device = use_fake_gpu(captures=captures)
        engine = make(tiny_dir, speculative, **limits)
        poison_model(device, engine)
        each = [sampling(i, 16) for i in range(3)]
        for index, regex in enumerate(("[A-D]{2,6}(,[0-9]+)*", "FIXED:[0-9]{9}")):
            structured = StructuredOutput(regex=regex)
            each[index] = dataclasses.replace(each[index], structured_output=structured)
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
def test_strategies_do_not_depend_on_the_batch_in_the_interpreter(
    tiny_dir: Path,
    interpreter: None,
    use_fake_gpu: Callable[..., FakeGpu],
    drafter: SpeculativeConfig,
    strategy: str,
) -> None:
    """Seeded texts are the same alone and in a batch, eager and with graphs."""
    speculative = dataclasses.replace(drafter, verify_strategy=strategy)
    each = [all_params(i, 20) for i in range(3)]
    results = []
    for captures, limits in ((False, {"max_num_seqs": 1}), (True, {"max_num_seqs": 3})):
        device = use_fake_gpu(captures=captures)
        engine = make(tiny_dir, speculative, **limits)
        poison_model(device, engine)
        results.append(bits(engine.generate(PROMPTS[:3], each)))
    assert results[1] == results[0]
    stats = engine.stats.speculative
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("model", simt.ACCUMULATIONS)
def test_cuda_kernels_change_no_bit_under_any_rounding(
    tiny_dir: Path, interpreter: None, use_fake_gpu: Callable[..., FakeGpu], model: str
) -> None:
    """More requests and tokens run under random schedules and every rounding rule of mma."""
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
            device = use_fake_gpu(captures=captures, poison=0x7F)
            engine = make(tiny_dir, speculative, **limits)
            poison_model(device, engine)
            results.append(bits(run(engine, max_tokens=24)))
    for other in results[1:]:
        assert other == results[0]


@pytest.mark.ci
def test_bundled_model_matches_the_cpu_in_the_interpreter(
    use_fake_gpu: Callable[..., FakeGpu], request: pytest.FixtureRequest
) -> None:
    """Outputs match the CPU up to rounding; speculation changes no bit."""
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2, ignore_eos=True)
    cpu = Engine(EngineConfig(device="cpu")).generate(BUNDLED_PROMPTS, params)
    request.getfixturevalue("interpreter")
    results = []
    for speculative in (NAIVE, NGRAM, MTP):
        use_fake_gpu()
        engine = Engine(EngineConfig(speculative_config=speculative, max_model_len=256))
        results.append(engine.generate(BUNDLED_PROMPTS, params))
    assert_close_outputs(cpu, results[0])
    assert bits(results[1]) == bits(results[0]) == bits(results[2])
    assert engine.stats.speculative.num_accepted_tokens > 0


def test_prefix_states_continue_on_the_device(
    tmp_path: Path, interpreter: None, use_fake_gpu: Callable[..., FakeGpu]
) -> None:
    """Linear attention continues from the cached states of an earlier request, also in graphs."""
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
    expected = None
    # The target is its own draft model, so every draft is accepted.
    own = SpeculativeConfig.from_dict(
        {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    )
    for speculative, caching in ((NAIVE, False), (NGRAM, True), (own, True)):
        use_fake_gpu(captures=caching)
        engine = make(tmp_path, speculative, max_num_seqs=2, enable_prefix_caching=caching)
        done = [engine.generate([prompt], params)[0] for prompt in prompts]
        assert [one.num_cached_tokens for one in done] == ([0, 32, 32] if caching else [0] * 3)
        expected = expected or bits(done)
        assert bits(done) == expected
    spec = engine.stats.speculative
    assert spec.num_accepted_tokens == spec.num_draft_tokens > 10


def test_faults_of_cuda_kernels_fail_the_step(
    tiny_dir: Path, interpreter: None, use_fake_gpu: Callable[..., FakeGpu]
) -> None:
    use_fake_gpu()
    engine = make(tiny_dir, NAIVE)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    name = engine.add_request([1, 2, 3], params)
    engine.step()
    request = engine._requests[name]
    request.token_ids[-1] = 64  # the vocabulary has 64 tokens
    with pytest.raises(EngineError, match="a step failed: embedding: token_ids"):
        engine.step()


# ---- faults and names ----


def test_failed_step_ends_only_its_requests(model_dir: Path) -> None:
    """A waiting request continues, and all pages are freed."""
    for speculative in (NAIVE, NGRAM, SUFFIX, MTP_SUFFIX):
        engine = make(model_dir, speculative, max_num_seqs=2)
        params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
        names = [engine.add_request([1, 2, 3 + index], params) for index in range(3)]
        engine.step()
        engine._requests[names[1]].token_ids[-1] = engine.vocab_size
        with pytest.raises(EngineError, match=r"a step failed: embedding: token_ids\[\d\] must be"):
            engine.step()
        assert not any(engine.abort(name) for name in names[:2])
        while engine.has_unfinished():  # the waiting request
            engine.step()
        assert (
            engine.completion(names[2]).token_ids
            == engine.generate([[1, 2, 5]], params)[0].token_ids
        )
        assert engine.num_free_pages == engine.num_pages
        check_pages(engine._pool)


def test_invalid_device_names_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type(open_device("cpu")) is Device
    for name in ("gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "cuda:²"):
        with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:N, got"):
            open_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert type(open_device("auto")) is Device
    for has_cuda, reason in ((False, "this build has no CUDA kernels"), (True, "no NVIDIA GPU")):
        monkeypatch.setattr(specops, "has_cuda", lambda has=has_cuda: has)
        with pytest.raises(ValueError, match=f"device cuda:3 is not available: .*{reason}"):
            open_device("cuda:3")
    assert main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("specops: device cuda is not available: ")


def test_unsupported_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specops, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(ValueError, match="cuda:1 is not available: there is 1 GPU, counted from 0"):
        open_device("cuda:1")
    with pytest.raises(ValueError, match=r"capability is 7\.5, and the kernels need 8\.0"):
        open_device("cuda")
    assert type(open_device("auto")) is Device


class FakeCuda:
    """torch.cuda without a GPU; records the calls of a CUDA device and checks their signatures."""

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


def test_graphs_are_captured_on_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_failed_capture_is_reported(monkeypatch: pytest.MonkeyPatch, fail_at: str) -> None:
    cuda = FakeCuda(monkeypatch)
    device = CudaDevice(0, graphs=True)
    cuda.fail_at = fail_at
    with pytest.raises(EngineError, match=f"graph: {fail_at} failed; use --enforce-eager"):
        device.capture(lambda: cuda.note("launch"))
    assert ("end" in cuda.calls) == (fail_at != "begin")


def test_pages_must_fit_in_memory(model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"num_pages must fit the memory of cpu: 10000000000 "):
        make(model_dir, num_pages=10**10)


def test_random_weights_need_no_checkpoint(model_dir: Path) -> None:
    first, second = make(model_dir), make(model_dir)
    assert bits(run(first)) == bits(run(second))
    assert not list(model_dir.glob("*.safetensors"))


# ---- a GPU ----


@needs_gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_speculation_changes_no_bit_on_a_gpu(model_dir: Path, eager: bool) -> None:
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
def test_all_parameters_change_no_bit_on_a_gpu(model_dir: Path, mode: str) -> None:
    each = [all_params(i, 40) for i in range(len(PROMPTS))] * 2
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
def test_bundled_model_matches_the_cpu_on_a_gpu() -> None:
    """Texts are equal up to near ties, and logprobs up to the noise of bf16."""
    params = SamplingParams(max_tokens=48, temperature=0, logprobs=2)
    outputs = [
        Engine(EngineConfig(device=name)).generate(BUNDLED_PROMPTS, params)
        for name in ("cpu", "cuda")
    ]
    assert_close_outputs(*outputs)


@needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_bundled_model_is_lossless_on_a_gpu(temperature: float) -> None:
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
def test_large_model_is_lossless_on_a_gpu(tmp_path: Path) -> None:
    """The model has the shape of Qwen3-8B and random weights."""
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
