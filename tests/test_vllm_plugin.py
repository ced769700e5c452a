# SPDX-License-Identifier: Apache-2.0
"""The plug-in for vLLM, as far as it works without vLLM: checks, threads and comparisons."""

import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specops.integrations.vllm import compiled, exactness, plugin, support, threads
from specops.integrations.vllm.decoding import Decoded, Job
from specops.integrations.vllm.exactness import compare
from specops.integrations.vllm.graph_check import GraphCheck
from specops.integrations.vllm.hooks import (
    HOOKS,
    SECOND_RUNNER,
    Hook,
    HookError,
    check,
    check_version,
    fault_of,
    of_parts,
)
from specops.integrations.vllm.settings import PARTS
from specops.integrations.vllm.threads import bound_cpus
from torch.fx.experimental.proxy_tensor import make_fx


def config(**changed: Any) -> Any:
    """Return a configuration of vLLM that can be exact, with these changes."""
    fields: dict[str, Any] = {
        "compilation_config": SimpleNamespace(
            mode=0, backend="inductor", custom_ops=["none"], inductor_compile_config={}
        ),
        "additional_config": {"of": "the user"},
        "lora_config": None,
        "kv_transfer_config": None,
        "watermark_config": None,
        "speculative_config": SimpleNamespace(rejection_sample_method="standard"),
        "scheduler_config": SimpleNamespace(async_scheduling=False),
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        "model_config": SimpleNamespace(
            runner_type="generate",
            logprobs_mode="raw_logprobs",
            logits_processors=None,
            enable_prompt_embeds=False,
            return_sampling_mask=False,
        ),
    }
    for name, value in changed.items():
        group, _, field = name.partition("__")
        if field:
            setattr(fields[group], field, value)
        else:
            fields[group] = value
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    "changed, fault",
    [
        ({}, None),
        ({"speculative_config": None}, None),
        ({"lora_config": object()}, "LoRA"),
        ({"watermark_config": object()}, "watermarking"),
        (
            {"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")},
            "the KV connector NixlConnector",
        ),
        ({"model_config__return_sampling_mask": True}, "return_sampling_mask"),
        ({"scheduler_config__async_scheduling": True}, "asynchronous scheduling"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size 2"),
        ({"model_config__runner_type": "pooling"}, "the runner pooling"),
        ({"model_config__logprobs_mode": "raw_logits"}, "logprobs_mode raw_logits"),
        ({"model_config__logits_processors": ["a"]}, "custom logits processors"),
        ({"model_config__enable_prompt_embeds": True}, "prompt embeddings"),
        (
            {"speculative_config__rejection_sample_method": "synthetic"},
            "rejection_sample_method synthetic (use SPECOPS_VLLM_VERIFY instead)",
        ),
    ],
)
def test_unsupported_configurations_are_reported(
    changed: dict[str, Any], fault: str | None
) -> None:
    assert support.faults_of_config(config(**changed), PARTS) == ([] if fault is None else [fault])


def test_installed_logits_processors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm.logits_processors": [SimpleNamespace(name="ban")]}
    monkeypatch.setattr(support, "entry_points", lambda group: installed[group])
    fault = "logits processors of installed packages (ban)"
    assert support.faults_of_config(config(), PARTS) == [fault]
    assert support.faults_of_config(config(), ["linear"]) == []


@pytest.mark.parametrize(
    "ranks, module, is_exact",
    [
        (1, None, True),
        (2, "module", True),
        (2, "_CPUSHMDistributed", True),
        (4, "_CPUSHMDistributed", True),
        (3, "module", False),
    ],
)
def test_inexact_communication_of_ranks_is_reported(
    ranks: int, module: str | None, is_exact: bool
) -> None:
    communicator = SimpleNamespace(dist_module=method(module)) if module else None
    group = SimpleNamespace(world_size=ranks, device_communicator=communicator)
    expected = f"tensor_parallel_size {ranks} over gloo (use shared memory or at most 2 ranks)"
    assert support.faults_of_ranks(group) == ([] if is_exact else [expected])


COMPILED = {"compilation_config__mode": 2}


@pytest.mark.parametrize(
    "changed, fault",
    [
        ({"additional_config": None}, None),
        (COMPILED, None),
        ({"compilation_config__mode": 3}, "compilation by mode 3, backend inductor"),
        (
            COMPILED | {"compilation_config__backend": "eager"},
            "compilation by mode 2, backend eager",
        ),
        (
            COMPILED | {"compilation_config__custom_ops": ["none", "-rms_norm"]},
            "compilation with custom op -rms_norm",
        ),
        (
            COMPILED
            | {"compilation_config__inductor_compile_config": {"post_grad_custom_post_pass": 1}},
            "compilation with a post_grad_custom_post_pass",
        ),
        (
            COMPILED | {"additional_config": "text"},
            "compilation with an additional_config of <class 'str'>",
        ),
    ],
)
def test_unsupported_compilation_is_reported(changed: dict[str, Any], fault: str | None) -> None:
    assert compiled.faults_of(config(**changed)) == ([] if fault is None else [fault])


def test_compilation_is_configured_for_the_parts() -> None:
    eager = config()
    compiled.prepare(eager, PARTS)
    assert eager.compilation_config.custom_ops == ["none"]
    exact, partly = config(**COMPILED), config(**COMPILED)
    compiled.prepare(exact, PARTS)
    given = exact.compilation_config
    assert given.custom_ops == ["all"]
    assert isinstance(given.inductor_compile_config["post_grad_custom_post_pass"], GraphCheck)
    compiled.prepare(partly, {"norm", "linear"})
    assert partly.compilation_config.inductor_compile_config == {}
    assert partly.additional_config == {"of": "the user", "specops": ["linear", "norm"]}


def look_at(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Run the check on a function's graph."""
    GraphCheck()(make_fx(function, tracing_mode="symbolic")(*inputs).graph)


def test_graph_may_move_numbers_and_call_specops() -> None:
    import specops.torch_ops  # noqa: F401  torch.ops.specops

    def good(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.embedding(tokens.clamp(min=0), table)[1:].reshape(-1, 4)
        out = torch.empty_like(x)
        torch.ops.specops.rms_norm(x, x.new_ones(4), 1e-6, None, out)
        return out.view(tokens.shape[0] - 1, -1).to(torch.bfloat16)

    look_at(good, torch.tensor([1, 2, 0]), torch.randn(3, 8))


@pytest.mark.parametrize(
    "function, name",
    [
        (lambda x: 2 * x, "aten::mul"),
        (lambda x: torch.nn.functional.silu(x).sum(-1), "aten::silu, aten::sum"),
        (lambda x: x @ x.T, "aten::mm"),
    ],
)
def test_graph_that_computes_is_refused(function: Callable[..., Any], name: str) -> None:
    with pytest.raises(support.NotExactError, match=f"a model that computes {name} itself"):
        look_at(function, torch.randn(4, 4))


def test_graph_with_a_graph_of_its_own_is_refused() -> None:
    def function(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with pytest.raises(support.NotExactError, match=r"a model that computes .*cond"):
        look_at(function, torch.randn(4))


LAYERS = "vllm.model_executor.layers"
LINEAR, EMBEDDING = f"{LAYERS}.linear", f"{LAYERS}.vocab_parallel_embedding"


def layer(name: str, module: str, **fields: Any) -> Any:
    """Return an object of a class with this name."""
    made = type(name, (), {"__module__": module})()
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def method(name: str) -> Any:
    return type(name, (), {})()


def linear(
    name: str = "RowParallelLinear",
    module: str = LINEAR,
    quant_method: str = "UnquantizedLinearMethod",
    product: str = "specops.integrations.vllm.packed_linear:PackedLinear",
) -> Any:
    of_product, _, product = product.partition(":")
    return layer(
        name,
        module,
        quant_method=layer(quant_method, module),
        cpu_linear=layer(product, of_product),
    )


def quantized(
    quant_method: str, kernel: str = "SpecopsWna16Kernel", scheme: str | None = None
) -> Any:
    """Return a quantized layer, whose kernel belongs to its method or to a scheme between them."""
    found = layer(kernel, "specops.integrations.vllm.quantized_linear")
    fields = {"scheme": layer(scheme, LINEAR, kernel=found)} if scheme else {}
    own = {} if scheme else {"kernel": found}
    return layer(
        "RowParallelLinear", LINEAR, quant_method=layer(quant_method, LINEAR, **own), **fields
    )


def attention(impl: str) -> Any:
    return layer(
        "Attention",
        f"{LAYERS}.attention.attention",
        impl=layer(impl, "specops.integrations.vllm.attention"),
    )


@pytest.mark.parametrize(
    "one, fault",
    [
        (layer("Qwen3MLP", "vllm.model_executor.models.qwen3"), None),
        (layer("ModuleList", "torch.nn.modules.container"), None),
        (layer("LayerNorm", "torch.nn.modules.normalization"), "torch.nn.LayerNorm, which"),
        (layer("SpecopsRMSNorm", "specops.integrations.vllm.layers"), None),
        (layer("RMSNorm", f"{LAYERS}.layernorm"), "RMSNorm of vLLM in place of specops'"),
        (layer("GeluAndMul", f"{LAYERS}.activation"), "GeluAndMul, which is not known to be row"),
        (layer("FusedMoE", f"{LAYERS}.fused_moe.layer"), "FusedMoE, which is not known"),
        (layer("MambaMixer", f"{LAYERS}.mamba.mamba_mixer"), "MambaMixer, a state-space layer"),
        (layer("RotaryEmbedding", f"{LAYERS}.rotary_embedding.base"), None),
        (layer("RotaryEmbedding", f"{LAYERS}.rotary_embedding.new"), "RotaryEmbedding, which is"),
        (linear(), None),
        (linear("ParallelLMHead", EMBEDDING, "UnquantizedEmbeddingMethod"), None),
        (linear(quant_method="Fp8"), "RowParallelLinear with Fp8"),
        (quantized("Gptq"), None),
        (quantized("Gptq", "Other"), "RowParallelLinear with Gptq"),
        (quantized("CompressedTensors", scheme="Int8"), None),
        (linear(product="torch:F"), "RowParallelLinear whose product is not specops'"),
        (attention("SpecopsAttentionImpl"), None),
        (attention("Other"), "attention by Other"),
    ],
    ids=lambda one: type(one).__name__ if not isinstance(one, str) else "",
)
def test_layers_that_are_not_row_identical_are_reported(one: Any, fault: str | None) -> None:
    model = SimpleNamespace(named_modules=lambda: [("a.b", one), ("a.c", one)])
    found = support.faults_of_layers(model, PARTS, {})
    assert len(found) == (fault is not None)
    if fault is not None:
        assert found[0].startswith(fault) and "(first: a.b)" in found[0]


def test_ops_of_layers_are_reported_beside_their_kinds() -> None:
    of_model = layer("Gate", "vllm.model_executor.models.own")
    gelu, helper = layer("GeluAndMul", f"{LAYERS}.activation"), layer("Helper", "own")
    model = SimpleNamespace(named_modules=lambda: [("", of_model), ("act", gelu), ("b", of_model)])
    ops = ["aten::silu", "aten::softplus"]
    computed = {type(of_model): ops, type(gelu): ops[:1], type(helper): ops[:1], None: ops[1:]}
    assert support.faults_of_layers(model, PARTS, computed) == [
        "Gate, which computes aten::silu, aten::softplus itself (first: the model)",
        "GeluAndMul, which is not known to be row-identical (first: act)",
        "Helper, which computes aten::silu itself",
        "a function, which computes aten::softplus itself",
    ]


def test_unsupported_ops_are_reported_once() -> None:
    impl = SimpleNamespace(specops_faults=["attention with sinks", "attention with ALiBi slopes"])
    product = SimpleNamespace(specops_faults=["a weight"])
    modules = [SimpleNamespace(impl=impl), SimpleNamespace(impl=impl), SimpleNamespace()]
    modules.append(SimpleNamespace(cpu_linear=product, specops_faults=["a norm"]))
    assert support.faults_of_ops(SimpleNamespace(modules=lambda: modules)) == [
        "attention with sinks",
        "attention with ALiBi slopes",
        "a norm",
        "a weight",
    ]


@pytest.mark.parametrize("parts", ["exact", "norm"])
def test_plugin_stays_off_unless_vllm_computes_on_a_cpu(
    parts: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    platform = layer("CudaPlatform", "vllm.platforms.cuda", is_cpu=lambda: False)
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = platform  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setenv("SPECOPS_VLLM", parts)
    sentence = "SPECOPS_VLLM requires vLLM on a CPU, got CudaPlatform"
    if parts == "exact":
        with pytest.raises(support.NotExactError, match=sentence):
            plugin.register()
    else:
        plugin.register()
        assert [sentence in message for message in caplog.messages] == [True]
    assert plugin.switched_on() == frozenset()


@pytest.mark.parametrize(
    "version, is_supported", [("0.32.1", True), ("0.33.0", False), ("0.3", False)]
)
def test_other_series_of_vllm_are_refused(version: str, is_supported: bool) -> None:
    if is_supported:
        check_version(version)
    else:
        with pytest.raises(HookError, match=f"supports vLLM 0.32, got {version}"):
            check_version(version)


@pytest.mark.parametrize(
    "parts, is_cpu, expected",
    [
        ("", True, None),
        ("exactly", True, None),
        ("norm", False, None),
        ("norm", True, "specops.integrations.vllm.platform.SpecopsCpuPlatform"),
    ],
)
def test_platform_is_chosen_on_a_cpu(
    parts: str, is_cpu: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    platforms = types.ModuleType("vllm.platforms")
    of_cpu = "vllm.platforms.cpu.CpuPlatform" if is_cpu else None
    platforms.builtin_platform_plugins = {"cpu": lambda: of_cpu}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setenv("SPECOPS_VLLM", parts)
    assert plugin.platform() == expected


def stub(monkeypatch: pytest.MonkeyPatch, **contents: Any) -> None:
    module = types.ModuleType("stub_of_vllm")
    for name, value in contents.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "stub_of_vllm", module)


def test_moved_hooks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def good(self: Any, x: int) -> None: ...

    class Kept:
        a: int

        def __init__(self) -> None:
            self.made = 1

        @property
        def calls(self) -> int:
            return 1

    stub(monkeypatch, good=good, Kept=Kept)

    def fault(target: str, *names: str) -> str | None:
        return fault_of(Hook("linear", f"stub_of_vllm:{target}", "replaced", names))

    assert fault("good", "self", "x") is None
    assert fault("good", "self", "y") == (
        "specops: stub_of_vllm:good must take (self, y), got (self, x)"
    )
    assert fault("Kept", "a", "made", "calls") is None
    assert fault("Kept", "a", "b", "c") == "specops: stub_of_vllm:Kept has no b, c"
    assert "vLLM has no stub_of_vllm:gone" in str(fault("gone"))
    called = Hook("linear", "stub_of_vllm:good", "called", ("x",))
    assert fault_of(called) is None
    assert fault_of(replace(called, names=("x", "y"))) == (
        "specops: stub_of_vllm:good does not take y"
    )
    with pytest.raises(HookError, match="no_such_module_of_vllm"):
        check([Hook("", "no_such_module_of_vllm:a", "read", ())])


def test_every_part_has_hooks() -> None:
    assert {hook.part for hook in HOOKS} == {*PARTS, "", SECOND_RUNNER}
    for part in PARTS:
        assert {hook.part for hook in of_parts({part})} == {part, ""}


@pytest.mark.parametrize(
    "environment, cpus",
    [
        ({}, set()),
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[0,1,7]"}, {0, 1, 7}),
        ({"GOMP_CPU_AFFINITY": "2 3"}, {2, 3}),
        ({"OMP_PLACES": "{4,5}"}, {4, 5}),
        ({"OMP_PLACES": "cores"}, set()),
        ({"OMP_PLACES": "{0:16}"}, set()),
        ({"GOMP_CPU_AFFINITY": "0-15"}, set()),
        ({"KMP_AFFINITY": "granularity=fine,compact,1,0", "OMP_PLACES": "{4,5}"}, {4, 5}),
    ],
)
def test_cpus_bound_by_vllm_are_read(environment: dict[str, str], cpus: set[int]) -> None:
    assert bound_cpus(environment) == cpus


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
@pytest.mark.ci
def test_threads_do_not_inherit_a_narrow_mask() -> None:
    """The main thread has one CPU when the pool starts, as in a process of vLLM.

    A worker leaves its caller's CPU, so it may have one CPU fewer than the process, but never the
    caller's alone.
    """
    code = """
import os, time
import torch
from specops import dense
from specops.integrations.vllm import threads
threads.remember_mask()
whole = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(whole)})
before = set(os.listdir("/proc/self/task"))
threads.start()
made = [int(thread) for thread in set(os.listdir("/proc/self/task")) - before]
assert made
x, weight = torch.zeros(64, 1024), dense.pack_weight(torch.zeros(1024, 1024))
deadline = time.monotonic() + 60
while any(os.sched_getaffinity(thread) == {min(whole)} for thread in made):
    assert time.monotonic() < deadline
    dense.linear(x, weight)
assert os.sched_getaffinity(0) == {min(whole)}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


class FakeNumba(types.ModuleType):
    """Stand-in for numba before or after it has started its threads."""

    def __init__(self, is_launched: bool) -> None:
        super().__init__("numba")
        self.is_launched = is_launched
        self.calls: list[str] = []
        self.config = SimpleNamespace(reload_config=self.reload_config)

    def reload_config(self) -> None:
        self.calls.append(f"reload {os.environ['NUMBA_NUM_THREADS']}")
        if self.is_launched:
            raise RuntimeError("Cannot set NUMBA_NUM_THREADS to a different value")

    def set_num_threads(self, count: int) -> None:
        self.calls.append(f"set {count}")


@pytest.mark.parametrize(
    "of_user, numba, variable, calls",
    [
        (None, None, "1", []),
        ("3", FakeNumba(False), "3", []),
        (None, FakeNumba(False), "1", ["reload 1"]),
        (None, FakeNumba(True), None, ["reload 1", "set 1"]),
    ],
    ids=["not imported", "the user's number", "imported", "running"],
)
def test_numba_starts_no_threads(
    of_user: str | None,
    numba: FakeNumba | None,
    variable: str | None,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NUMBA_NUM_THREADS", "to be put back")
    if of_user is None:
        monkeypatch.delenv("NUMBA_NUM_THREADS")
    else:
        monkeypatch.setenv("NUMBA_NUM_THREADS", of_user)
    if numba is None:
        monkeypatch.delitem(sys.modules, "numba", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "numba", numba)
    threads.rest_numba()
    assert os.environ.get("NUMBA_NUM_THREADS") == variable
    assert (numba.calls if numba else []) == calls


def test_runs_are_compared_token_by_token_and_bit_by_bit() -> None:
    base = Decoded([[1, 2, 3], [4, 5], [6]], [["a", "b", "c"], ["d", "e"], ["f"]], 1.0, 6)
    same = compare(base, base, "vllm", "plain", 1, 0.0)
    assert (same.texts, same.logprobs, same.first) == (0, 0, None)
    bits = Decoded([[1, 2, 3], [4, 5], [6]], [["a", "b", "x"], ["d", "e"], ["f"]], 1.0, 6)
    assert compare(base, bits, "vllm", "plain", 1, 0.0).logprobs == 1
    other = Decoded([[1, 2, 3], [4, 7], [6, 6]], [["a", "b", "c"], ["d", "e"], ["f"]], 1.0, 6)
    found = compare(base, other, "vllm", "ngram", 8, 0.8)
    assert (found.texts, found.logprobs, found.first) == (2, 2, (1, 1))
    assert found.row()[:6] == ["vllm", "ngram", "8", "0.8", "3", "7"]


def test_first_difference_of_texts_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    left, right = Decoded([[1, 2, 3]], [["a", "b", "c"]]), Decoded([[1, 2, 4]], [["a", "b", "d"]])
    exactness.print_table([compare(left, right, "vllm", "ngram", 8, 0.0)])
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == (
        "vllm, ngram, batch 8, temperature 0: first difference at prompt 0, output token 2"
    )


def fake_decode(guilty: str, jobs: list[Job]) -> Any:
    """Return a decoder whose texts depend on the batch if vLLM computes the part `guilty`."""

    def decode(job: Job) -> list[Decoded]:
        jobs.append(job)
        exact = job.parts == "exact" or guilty in job.parts.split(",")
        found = []
        for run in job.runs:
            bits = "same" if exact else f"batch {run.batch}"
            count = len(run.prompts)
            found.append(Decoded([[1, 2]] * count, [[bits, bits]] * count, 1.0, 2))
        return found

    return decode


def test_cache_size_of_the_engines_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(exactness, "decode", fake_decode("linear", jobs))
    assert exactness.main(["--model", "m", "--kv-cache-gib", "0.5", "--kernels", "specops"]) == 0
    assert {job.engine["kv_cache_memory_bytes"] for job in jobs} == {1 << 29}


def test_exactness_is_compared_between_specops_and_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(exactness, "decode", fake_decode("linear", jobs))
    arguments = [
        "--model",
        "m",
        "--prompts",
        "3",
        "--method",
        "plain",
        "ngram",
        "--batch",
        "1",
        "8",
    ]
    assert exactness.main(arguments) == 0
    shown = capsys.readouterr().out.splitlines()
    rows = {tuple(line.split()[:4]): line.split()[-2:] for line in shown if len(line.split()) == 9}
    assert rows["vllm", "plain", "8", "0"] == ["0", "3"]
    assert rows["vllm", "ngram", "1", "0.8"] == ["0", "0"]
    assert rows["specops", "ngram", "8", "0"] == ["0", "0"]
    assert "With specops, 0 of 18 outputs differ." in shown
    assert [job.parts for job in jobs] == ["", "", "exact", "exact"]
    assert jobs[1].engine["speculative_config"]["num_speculative_tokens"] == 4
    assert [job.engine["kv_cache_memory_bytes"] for job in jobs] == [1 << 30] * 4
    assert [(run.params[0]["temperature"], run.batch) for run in jobs[0].runs] == [
        (0.0, 1),
        (0.8, 1),
        (0.0, 8),
        (0.8, 8),
    ]


def test_sampled_outputs_may_differ_under_rejection(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy runs and runs without drafts must still be equal."""
    jobs: list[Job] = []

    def decode(job: Job) -> list[Decoded]:
        jobs.append(job)
        drafted = "speculative_config" in job.engine
        texts = [[2] if drafted and run.params[0]["temperature"] else [1] for run in job.runs]
        return [Decoded([text], [["bits"]], 1.0, 1) for text in texts]

    monkeypatch.setattr(exactness, "decode", decode)
    arguments = ["--model", "m", "--prompts", "1", "--method", "ngram", "--batch", "2"]
    assert exactness.main([*arguments, "--kernels", "specops"]) == 1
    assert exactness.main([*arguments, "--kernels", "specops", "--verify", "rejection"]) == 0
    assert "With specops, 0 of 3 outputs differ." in capsys.readouterr().out
    assert [job.strategy for job in jobs] == ["target_match"] * 2 + ["rejection"] * 2
    assert exactness.main([*arguments, "--kernels", "specops", "--compiled"]) == 1
    assert [job.engine["enforce_eager"] for job in jobs] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("guilty", PARTS)
def test_bisecting_names_the_part(
    guilty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exactness, "decode", fake_decode(guilty, []))
    arguments = ["--model", "m", "--prompts", "2", "--method", "plain", "--bisect"]
    assert exactness.main(arguments) == 1
    shown = capsys.readouterr().out
    assert f"First part that is not row-identical: vllm's {guilty}. All: vllm's {guilty}." in shown


def test_invalid_arguments_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exactness, "decode", fake_decode("", []))
    assert exactness.main(["--model", "m", "--prompts", "999"]) == 2
    assert "--prompts must be 1 to 20, got 999" in capsys.readouterr().err
