# SPDX-License-Identifier: Apache-2.0
"""Ops under torch's dispatcher and compiler: all are registered, and compiling changes no bit."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import specops
import torch
from checkpoints import make_checkpoint
from sampling_cases import by_field
from specops import _C, batching, dense, ngram, sampling, torch_ops
from specops.batching import BatchIndices, OutputMode
from specops.engine.models import KvCache, StepBatch, Transformer, load_model
from specops.ngram import NgramIndex
from test_errors import GOOD_CALLS, OPS, TENSOR_OPS, WHOLE_CALLS, call, fields_apart, ints, spread
from torch import Tensor

pytestmark = pytest.mark.ci

# take_error is not an op of a graph; torch_ops.py says why.
NAMES = sorted(set(TENSOR_OPS) - {"take_error"})
ASSETS = Path(specops.__file__).with_name("assets")


def overloads(name: str) -> list[Any]:
    return [op for key, op in torch_ops.OPS.items() if key.partition(".")[0] == name]


def good_arguments(op: Any) -> list[Any]:
    """Return arguments of a valid call of the op, with the types of this overload."""
    arguments = fields_apart(GOOD_CALLS[op._schema.name.split("::")[1]]())
    for argument in op._schema.arguments:
        kind = {"int": int, "bool": bool}.get(str(argument.type))
        if isinstance(arguments[argument.name], Tensor) and kind is not None:
            arguments[argument.name] = kind(arguments[argument.name][0])
    return list(arguments.values())


# Values in the tables of these ops decide which parts of them are written.
KEEPERS = ("specops::commit", "specops::advance_draft_batch", "specops::ngram_propose")
EVERY_OVERLOAD = [op for name in NAMES for op in overloads(name)]


@pytest.mark.parametrize("name", NAMES)
def test_every_op_has_a_schema_of_its_arguments(name: str) -> None:
    assert overloads(name), f"torch_ops.py has made no schema of {name}"
    kinds = {argument.replace(".", "_"): kind for argument, kind in OPS[name].items()}
    for op in overloads(name):
        arguments = op._schema.arguments
        assert [argument.name for argument in arguments] == list(fields_apart(GOOD_CALLS[name]()))
        assert not op._schema.returns
        for argument in arguments:
            if argument.name not in kinds:  # a field of a packed weight
                continue
            # An overload exists for each type in `int | Tensor`.
            wanted = kinds[argument.name]
            if wanted not in ("int | Tensor", "bool | Tensor"):
                kind = str(argument.type).replace("Optional[Tensor]", "Tensor | None")
                # A number for all rows becomes a tensor on the way.
                wanted = wanted.replace("Tensor | float |", "Tensor |")
                wanted = wanted.replace("Tensor | int |", "Tensor |")
                assert kind == wanted or "Tensor" not in kind, argument.name


def test_missing_schema_is_noticed() -> None:
    with pytest.raises(AssertionError, match="has made no schema of no_such_op"):
        test_every_op_has_a_schema_of_its_arguments("no_such_op")


@pytest.mark.parametrize("op", EVERY_OVERLOAD, ids=str)
def test_every_overload_has_kernels_for_both_devices(op: Any) -> None:
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


@pytest.mark.parametrize("op", EVERY_OVERLOAD, ids=str)
def test_op_writes_what_its_schema_declares(op: Any) -> None:
    """An argument keeps its contents if and only if the schema does not mark it as written."""
    poisoned = good_arguments(op)
    for argument, value in zip(op._schema.arguments, poisoned, strict=True):
        mark = argument.alias_info is not None and argument.alias_info.is_write
        keeps_contents = argument.name.endswith(("cache", "scales"))
        keeps_contents |= argument.name in ("cache_k", "cache_v")
        keeps_contents |= argument.name in ("residual", "workspace", "kept", "states")
        if mark and not keeps_contents and op._schema.name not in KEEPERS:
            value.fill_(77)
    before = [v.clone() if isinstance(v, Tensor) else v for v in poisoned]
    op(*poisoned)
    direct = good_arguments(op)
    name = op._schema.name.split("::")[1]
    whole = direct
    if len(OPS[name]) < len(direct):  # takes a packed weight, the op's second argument
        whole = [direct[0], dense.PackedWeight(*direct[1:12]), *direct[12:]]
    call(name, dict(zip(OPS[name], whole, strict=True)))
    for argument, old, got, want in zip(
        op._schema.arguments, before, poisoned, direct, strict=True
    ):
        if not isinstance(got, Tensor):
            continue
        if argument.alias_info is None:
            assert torch.equal(got, old), f"{argument.name} was written"
        elif argument.name != "workspace":
            assert torch.equal(got, want), argument.name
            assert not (got == 77).any(), f"{argument.name} was not written"


@pytest.mark.parametrize("op", EVERY_OVERLOAD, ids=str)
def test_ops_pass_opcheck(op: Any) -> None:
    results = torch.library.opcheck(op, tuple(good_arguments(op)))
    assert set(results.values()) == {"SUCCESS"}, results


def test_errors_are_the_same_under_torch() -> None:
    with pytest.raises(ValueError, match=r"^silu_mul: out must be .*got float32 \[4, 4\]"):
        torch.ops.specops.silu_mul(torch.zeros(3, 8), torch.zeros(4, 4))


def test_torch_ops_are_not_imported_by_default() -> None:
    code = (
        "import sys, specops.engine, specops.attention, specops.batching, specops.dense\n"
        "import specops.ngram, specops.sampling\n"
        "assert 'specops.torch_ops' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def calls_in(graph: torch.fx.Graph) -> list[str]:
    names = [str(node.target) for node in graph.nodes]
    return [name for name in names if name.startswith("specops.")]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile in one functionalized graph. `inductor` takes seconds and has its own tests."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("name", NAMES)
def test_compiled_op_equals_the_eager_op(name: str) -> None:
    """Every tensor argument, written or not, ends with the same contents."""
    arguments, want, again = (WHOLE_CALLS[name]() for _ in range(3))
    graphs: list[list[str]] = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(calls_in(module.graph))
        return module

    function = getattr(_C, name)
    torch._dynamo.reset()
    torch.compile(lambda *args: function(*args), fullgraph=True, backend=backend)(
        *arguments.values()
    )
    function(*want.values())
    assert len(graphs) == 1 and len(graphs[0]) == 1
    assert graphs[0][0].startswith(f"specops.{name}.")
    compiled(lambda *args: function(*args))(*again.values())
    every = (spread(one).values() for one in (arguments, again, want))
    for got, functional, expected in zip(*every, strict=True):
        if isinstance(expected, Tensor):
            assert torch.equal(got, expected) and torch.equal(functional, expected)


@pytest.mark.parametrize("low", [1, "tensor"])
@pytest.mark.parametrize("high", [3, "tensor"])
@pytest.mark.parametrize("leftmost", [True, "tensor"])
def test_ngram_sizes_may_be_numbers_or_tensors(low: Any, high: Any, leftmost: Any) -> None:
    tokens = torch.randint(0, 4, (3, 40), dtype=torch.int32)
    options = {
        "min_ngram_size": ints(1, 2, 1) if low == "tensor" else low,
        "max_ngram_size": ints(3, 2, 5) if high == "tensor" else high,
        "leftmost": ints(0, 1, 1) if leftmost == "tensor" else leftmost,
        "index": NgramIndex.empty(3, 40, scan_tokens=5),
        "max_total_draft_tokens": 5,
    }

    def propose() -> tuple[Tensor, Tensor]:
        drafts = torch.empty(3, 4, dtype=torch.int32)
        return ngram.ngram_propose(
            tokens, ints(40, 0, 21), ints(4, 4, 2), draft_token_ids=drafts, **options
        )

    for got, want in zip(compiled(propose)(), propose(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("traced", [False, True])
def test_one_number_applies_to_all_rows(traced: bool) -> None:
    """A number equals a tensor filled with it, in eager code and in a graph."""
    logits = 3 * torch.randn(6, 50)
    drafts = logits.argmax(-1).int().view(2, 3)[:, :2].contiguous()
    positions, starts, indptr = ints(*range(6)), ints(4, 9), ints(0, 3, 6)
    seeds = torch.arange(6)
    numbers: dict[str, Any] = {"temperature": 0.75, "top_k": 20, "top_p": 0.875, "min_p": 0.0625}
    numbers |= {"typical_p": 0.96875, "choice_index": 3}

    def results(count: Callable[[int], Callable[[Any], Any]]) -> list[Tensor]:
        def of(rows: int) -> dict[str, Any]:
            return {name: count(rows)(number) for name, number in numbers.items()}

        def function() -> list[Tensor]:
            filters = {name: value for name, value in of(2).items() if name != "choice_index"}
            return [
                by_field(sampling.sample)(logits, positions, **of(6), seeds=seeds),
                *by_field(sampling.verify)(
                    logits,
                    indptr,
                    drafts,
                    positions=starts,
                    strategy=count(2)(sampling.VerifyStrategy.BLOCK),
                    policy=count(2)(sampling.AcceptPolicy.NORMAL),
                    seeds=seeds[:2],
                    **of(2),
                ),
                *by_field(sampling.top_logprobs)(
                    logits,
                    3,
                    processed_logprobs=True,
                    output_indptr=indptr,
                    draft_token_ids=drafts,
                    **filters,
                ),
            ]

        return compiled(function)() if traced else function()

    def tensor(rows: int) -> Callable[[Any], Tensor]:
        def full(number: Any) -> Tensor:
            dtype = torch.float32 if isinstance(number, float) else torch.int32
            return torch.full((rows,), number, dtype=dtype)

        return full

    for got, want in zip(results(lambda _: lambda x: x), results(tensor), strict=True):
        assert torch.equal(got, want)


def test_output_may_be_an_input() -> None:
    x, weight = torch.randn(5, 16), torch.randn(16)

    def function(x: Tensor) -> Tensor:
        hidden = x * 2
        dense.rms_norm(hidden, weight, 1e-6, out=hidden)
        return hidden + 1

    assert torch.equal(compiled(function)(x), function(x))


def test_dynamic_shapes_are_compiled_once() -> None:
    """One graph serves all sizes of batches and rows."""
    embedding, norm = torch.randn(30, 64), torch.randn(64)
    weight = dense.pack_weight(torch.randn(48, 64))
    graphs = 0

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module

    def function(token_ids: Tensor) -> Tensor:
        x = dense.rms_norm(dense.embedding(token_ids, embedding), norm, 1e-6)
        return dense.silu_mul(dense.linear(x, weight))

    torch._dynamo.reset()
    dynamic = torch.compile(function, fullgraph=True, backend=backend)
    for rows in (3, 2, 7, 40, 1500):
        token_ids = torch.randint(0, 30, (rows,), dtype=torch.int32)
        torch._dynamo.mark_dynamic(token_ids, 0)
        assert torch.equal(dynamic(token_ids), function(token_ids))
    assert graphs == 1


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = dense.pack_weight(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return dense.silu_mul(dense.linear(x, self.weight))


def test_ops_can_be_exported() -> None:
    block, rows = Block(), torch.export.Dim("rows")
    exported = torch.export.export(
        block, (torch.randn(3, 16),), dynamic_shapes={"x": {0: rows}}, strict=True
    )
    assert calls_in(exported.graph) == ["specops.linear.default", "specops.silu_mul.default"]
    x = torch.randn(5, 16)
    assert torch.equal(exported.module()(x), block(x))


class Step:
    """Step like an engine's: indices, the bundled model, verification, logprobs and new drafts."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.options = {
            "temperature": torch.tensor([0.0, 0.8, 1.0]),
            "top_k": ints(0, 40, 0),
            "top_p": torch.tensor([1.0, 0.9, 1.0]),
            "min_p": torch.tensor([0.0, 0.0, 0.05]),
            "seeds": torch.tensor([1, 2, 3]),
            "strategy": ints(1, 1, 1),
            "policy": ints(0, 0, 0),
        }

    def __call__(
        self,
        cache: KvCache,
        token_ids: Tensor,
        drafts: Tensor,
        history: Tensor,
        qo_lens: Tensor,
        kv_lens: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
    ) -> tuple[Tensor, ...]:
        rows = token_ids.shape[0]
        indices = batching.prepare_batch(
            qo_lens,
            kv_lens,
            torch.full_like(qo_lens, int(OutputMode.ALL)),
            kv_indptr,
            kv_indices,
            page_size=16,
            total_rows=rows,
            num_output_rows=rows,
        )
        batch = StepBatch(
            token_ids=token_ids,
            positions=indices.positions,
            cache_slots=indices.cache_slots,
            qo_indptr=indices.qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_lens=kv_lens,
        )
        hidden = batching.gather_output_rows(self.model.forward(batch, cache), indices.output_rows)
        logits = self.model.logits(hidden)
        emitted, accepted = by_field(sampling.verify)(
            logits,
            indices.output_indptr,
            drafts,
            positions=kv_lens - qo_lens + 1,
            **self.options,
        )
        top = sampling.top_logprobs(logits, 3)
        proposed = ngram.ngram_propose(
            history,
            kv_lens,
            torch.full_like(kv_lens, 2),
            min_ngram_size=1,
            max_ngram_size=3,
            draft_token_ids=torch.empty_like(drafts),
        )
        return logits, emitted, accepted, *top, *proposed


def run_steps(step: Callable[..., tuple[Tensor, ...]], model: Transformer) -> list[Tensor]:
    """Run two steps of three requests: a prefill chunk beside drafts, then drafts again."""
    torch.manual_seed(1)
    cache = model.new_kv_cache(12, 16)
    pages = torch.randperm(12).int()
    history = torch.randint(0, model.config.vocab_size, (3, 64), dtype=torch.int32)
    done: list[Tensor] = []
    kv_lens = ints(0, 0, 0)
    for qo_lens in (ints(3, 1, 2), ints(1, 3, 2)):
        kv_lens = kv_lens + qo_lens
        rows = int(qo_lens.sum())
        token_ids = torch.randint(0, model.config.vocab_size, (rows,), dtype=torch.int32)
        drafts = torch.randint(0, model.config.vocab_size, (3, 2), dtype=torch.int32)
        arguments = (token_ids, drafts, history, qo_lens, kv_lens, ints(0, 4, 8, 12), pages)
        done += [tensor.clone() for tensor in step(cache, *arguments)]
    return [*done, *cache.tensors]


@pytest.fixture(scope="module", params=["tiny", pytest.param("bundled", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    """Load a model and run it once to make its buffers. Otherwise a step is compiled twice."""
    directory = ASSETS
    if request.param == "tiny":  # the time of inductor grows with layers
        directory = tmp_path_factory.mktemp("tiny")
        make_checkpoint(directory, "Qwen3", num_hidden_layers=2)
    model = load_model(directory, dtype="bfloat16")
    run_steps(Step(model), model)
    return model


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_step_changes_no_bit(model: Transformer, backend: str) -> None:
    """Logits, tokens, logprobs and caches of a step in one graph are equal."""
    step = Step(model)
    torch._dynamo.reset()
    got = run_steps(torch.compile(step, fullgraph=True, backend=backend), model)
    want = run_steps(step, model)
    assert len(got) == len(want)
    for index, (tensor, expected) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(tensor, expected), index


def test_compiler_copies_no_cache(model: Transformer) -> None:
    """Functionalization turns writes into new tensors, and inductor must turn them back."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    step = torch.compile(Step(model), fullgraph=True)
    _, (code,) = run_and_get_code(run_steps, step, model)
    calls = re.findall(r"torch\.ops\.specops\.(\w+)\.default\(", code)
    assert calls.count("rope_append_kv") == model.config.num_layers
    assert "copy_" not in code and "clone" not in code
    cache_shape = tuple(model.new_kv_cache(12, 16).layers[0].k.shape)
    assert f"empty_strided_cpu({cache_shape}" not in code


def test_prepare_batch_fills_a_provided_output() -> None:
    arguments = GOOD_CALLS["prepare_batch"]()
    inputs = {name: arguments[name] for name in ("qo_lens", "kv_lens", "output_modes")}
    inputs |= {name: arguments[name] for name in ("kv_indptr", "kv_indices")}
    sizes = {"total_rows": 5, "num_output_rows": 4, "max_seq_len": 32}

    def prepare(out: BatchIndices) -> BatchIndices:
        return batching.prepare_batch(**inputs, page_size=16, **sizes, out=out)

    got = BatchIndices.empty(2, **sizes)
    compiled(prepare)(got)
    want = prepare(BatchIndices.empty(2, **sizes))
    for name, tensor in asdict(want).items():
        assert torch.equal(getattr(got, name), tensor), name
