# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: their values, and that no other request changes a bit of a request with one."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ATTENTION, EVERY, MLP, merge, write_adapter
from checkpoints import SHARED_KV, lasting_directory, make_checkpoint, write_tokenizer
from fake_gpu import FakeGpu
from safetensors.torch import load_file, save_file
from specops.api.config import BUNDLED_MODEL
from specops.audit import AuditRecord, audit
from specops.engine import (
    Completion,
    Engine,
    EngineConfig,
    ModelError,
    SamplingParams,
    UnknownAdapter,
)
from specops.engine.models.adapters import adapter_rows, add_adapters
from test_experts import make_experts

NUM_ADAPTERS = 8
PROMPT = [7, 8, 9, 10] * 10
PLAIN = {"method": "naive"}
FAMILIES = (
    "qwen3",
    "glm4",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "granite",
    "nemotron_h_latent",
    "kimi_linear",
    "gemma4_experts",
    "falcon_h1",
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1}


@cache
def model_dir(family: str = "Qwen3") -> Path:
    """Write a model with eight adapters of four layouts, with different scales and dtypes."""
    folder = lasting_directory()
    model = folder / "model"
    model.mkdir()
    make_checkpoint(model, family, **(SHARED_KV if family == "Gemma4" else {}))
    write_tokenizer(model)
    modules = [(*ATTENTION, *MLP), ATTENTION, (*MLP, "o_proj"), ("q_proj", "v_proj")]
    for index in range(NUM_ADAPTERS):
        write_adapter(
            folder / f"lora{index}",
            model,
            index,
            modules=modules[index % 4],
            rank=(4, 8, 3, 8)[index % 4],
            dtype=torch.bfloat16 if index % 2 else torch.float32,
            use_rslora=index == 6,
        )
    return folder


def names() -> list[str]:
    return [f"lora{index}" for index in range(NUM_ADAPTERS)]


def engine(adapters: Sequence[str] = (), **config: Any) -> Engine:
    folder = model_dir()
    config.setdefault("dtype", "float32")
    config.setdefault("num_threads", 1)
    return Engine(
        EngineConfig(
            model=str(folder / "model"),
            lora_modules=tuple((name, str(folder / name)) for name in adapters),
            device="cpu",
            **config,
        )
    )


def params(index: int, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "max_tokens": 12,
            "temperature": (0.0, 0.8)[index % 2],
            "seed": index,
            "logprobs": 2,
            "ignore_eos": True,
            **more,
        }
    )


def bits(completion: Completion) -> Any:
    return completion.token_ids, completion.logprobs


def prompt_of(index: int) -> list[int]:
    return [*PROMPT, *range(20, 20 + index % 5)]


def run(
    engine: Engine, requests: Sequence[tuple[str | None, int]], speculative: dict[str, Any]
) -> list[Any]:
    """Run requests together, each with an adapter and a number; return their bits."""
    ids = [
        engine.add_request(
            prompt_of(index),
            params(index),
            speculative_config=speculative,
            adapter=adapter,
        )
        for adapter, index in requests
    ]
    while engine.has_unfinished():
        engine.step()
    assert engine.num_free_pages == engine.num_pages
    return [bits(engine.completion(one)) for one in ids]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True, "modules": ATTENTION},
        {"modules": MLP, "rank_pattern": {"up_proj": 2}, "alpha_pattern": {"down_proj": 1}},
        {"modules": ("k_proj", "down_proj"), "dtype": torch.bfloat16},
        {"modules": ("q_proj",), "dtype": torch.float16},
    ],
)
@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Gemma3", "Gemma4"])
@pytest.mark.pairwise
def test_logits_are_those_of_merged_weights(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    folder = model_dir(family)
    adapter = write_adapter(tmp_path / "lora", folder / "model", 3, **changes)
    ours = Engine(
        EngineConfig(
            model=str(folder / "model"),
            lora_modules=(("one", str(adapter)),),
            dtype="float32",
            device="cpu",
        )
    )
    asked = params(0, max_tokens=1, logprobs=20)
    (done,) = ours.generate([PROMPT], asked, adapter="one")
    found = dict(done.logprobs[0].alternatives)

    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32
    )

    def difference() -> float:
        with torch.no_grad():
            logits = theirs(torch.tensor([PROMPT])).logits[0, -1].double()
        expected = logits.log_softmax(-1)
        return max(abs(found[token] - expected[token].item()) for token in found)

    assert difference() > 1e-2  # the adapter has an effect
    merge(theirs, adapter)
    assert difference() < 2e-5


KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "wint8": {"dtype": "bfloat16", "quantization": "wint8"},
    "wint4": {"dtype": "bfloat16", "quantization": "wint4"},
    "int8_cache": {"dtype": "float32", "kv_cache_dtype": "int8"},
}


@cache
def alone(kind: str) -> list[Any]:
    """Return the bits of a request of each adapter, alone in an engine with this adapter only."""
    return [
        run(engine([name], max_num_seqs=1, **KINDS[kind]), [(name, index)], PLAIN)[0]
        for index, name in enumerate(names())
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_other_requests_change_no_bit(kind: str) -> None:
    expected = alone(kind)
    assert len({str(one) for one in expected}) == NUM_ADAPTERS
    ours = engine(names(), **KINDS[kind])
    base = run(engine(**KINDS[kind]), [(None, 8), (None, 9)], PLAIN)
    requests = [(name, index) for index, name in enumerate(names())]
    mixed = [*requests[4:], (None, 8), *requests[:4], (None, 9), requests[2]]
    expected = [*expected[4:], base[0], *expected[:4], base[1], expected[2]]
    for speculative in (PLAIN, NGRAM):
        assert run(ours, mixed, speculative) == expected
        # The prefix cache is warm now. The rows of an adapter are in several groups.
        assert run(ours, mixed[::-1], speculative) == expected[::-1]
    assert ours.stats.prefix_cache_hits > 0
    assert ours.stats.speculative.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "config",
    [
        {"num_pages": 17, "max_model_len": 80},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"enable_cascade_attention": False, "num_threads": 2},
    ],
)
def test_scheduling_changes_no_bit(config: dict[str, Any]) -> None:
    ours = engine(names(), **config)
    requests = [(name, index) for index, name in enumerate(names())]
    assert run(ours, requests, NGRAM) == alone("float32")
    assert run(ours, requests, PLAIN) == alone("float32")
    if "num_pages" in config:
        assert ours.stats.num_preemptions > 0


def test_adapters_share_no_pages() -> None:
    ours = engine(["lora0", "lora1"])
    for adapter in (None, "lora0", "lora1"):
        for cached in (0, 32):
            (done,) = ours.generate([PROMPT], params(0), adapter=adapter)
            assert done.num_cached_tokens == cached


def test_rows_without_an_adapter_keep_negative_zeros() -> None:
    ours = engine(["lora0"])
    adapter = ours.adapter("lora0")
    site = next(iter(adapter.bank.products))
    x = torch.randn(6, site.inputs)
    for rows in ([range(1, 3)], [range(0, 1), range(4, 6)]):
        out = torch.full((6, sum(site.outputs)), -0.0)
        add_adapters(adapter_rows({adapter: rows}, out.device), site, x, out)
        changed = {row for one in rows for row in one}
        for row in range(6):
            assert out[row].any() == (row in changed)
            assert row in changed or out[row].signbit().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_has_the_same_product_in_every_place(dtype: str, isa: str) -> None:
    """Also where sums are denormal, which some conversions flush to zero."""
    ours = engine(["lora0", "lora1", "lora3"], dtype=dtype)
    torch.manual_seed(0)
    magnitudes = 10.0 ** torch.randint(-42, 1, (21, 1))
    for adapter in map(ours.adapter, ours.adapters):
        for site in list(adapter.bank.products)[:4]:
            x, out = (
                (torch.randn(21, width) * magnitudes).to(ours._model.dtype)
                for width in (site.inputs, sum(site.outputs))
            )

            def added(rows: list[range], x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
                out = out.clone()
                add_adapters(adapter_rows({adapter: rows}, out.device), site, x, out)  # noqa: B023
                return out.view(torch.int16 if out.dtype == torch.bfloat16 else torch.int32)

            whole = added([range(21)], x, out)
            some = [range(1), range(3, 8), range(20, 21)]
            for row in (0, 3, 5, 7, 20):
                assert torch.equal(added(some, x, out)[row], whole[row])
            for row in range(21):
                alone = added([range(1)], x[row : row + 1], out[row : row + 1])
                assert torch.equal(alone[0], whole[row])


def test_engine_of_adapters_has_the_bits_of_an_engine_without() -> None:
    requests = [(None, index) for index in range(4)]
    for kind in ("float32", "wint4"):
        expected = run(engine(**KINDS[kind]), requests, PLAIN)
        assert run(engine(enable_lora=True, **KINDS[kind]), requests, NGRAM) == expected


def test_unloaded_adapter_serves_the_requests_that_run() -> None:
    ours = engine(names())
    running = ours.add_request(PROMPT, params(0), speculative_config=NGRAM, adapter="lora0")
    waiting = ours.add_request(PROMPT, params(0), speculative_config=PLAIN, adapter="lora0")
    alike = ours.add_request(prompt_of(4), params(4), speculative_config=NGRAM, adapter="lora4")
    ours.step()
    ours.unload_adapter("lora0")
    assert list(ours.adapters) == names()[1:]
    with pytest.raises(UnknownAdapter, match=r"adapter must be one that is loaded .*got 'lora0'"):
        ours.add_request(PROMPT, params(0), adapter="lora0")
    with pytest.raises(UnknownAdapter, match="got 'lora0'"):
        ours.unload_adapter("lora0")
    ours.load_adapter("lora0", model_dir() / "lora1")  # another one under the same name
    renamed = ours.add_request(PROMPT, params(1), speculative_config=PLAIN, adapter="lora0")
    while ours.has_unfinished():
        ours.step()
    assert bits(ours.completion(running)) == bits(ours.completion(waiting)) == alone("float32")[0]
    assert bits(ours.completion(alike)) == alone("float32")[4]
    (other,) = ours.generate([PROMPT], params(1), adapter="lora1")
    assert bits(ours.completion(renamed)) == bits(other)


def test_adapters_that_are_loaded_later_change_no_bit() -> None:
    ours = engine(["lora2", "lora6"])  # one layout, two scales
    for name in ("lora1", "lora5"):
        ours.load_adapter(name, model_dir() / name)
    ours.load_adapter("again", model_dir() / "lora6")
    requests: list[tuple[str | None, int]] = [("lora2", 2), ("lora6", 6), ("again", 6)]
    expected = [alone("float32")[index] for index in (2, 6, 6, 1, 5)]
    assert run(ours, [*requests, ("lora1", 1), ("lora5", 5)], NGRAM) == expected


def test_captured_steps_are_replayed_without_adapters_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base: list[tuple[str | None, int]] = [(None, 0), (None, 1)]
    mixed = [("lora0", 0), base[1]]  # steps of the same shapes
    plain = run(engine(), base, PLAIN)
    expected = [alone("float32")[0], plain[1]]
    monkeypatch.setattr("specops.engine.engine.open_device", lambda *_, **__: FakeGpu())
    for first in (base, mixed):
        ours = engine(["lora0"], enable_prefix_caching=False)
        for requests in (first, base, mixed, base):
            assert run(ours, requests, PLAIN) == (plain if requests is base else expected)
        assert ours.num_captures > 0


def test_cache_events_name_the_adapter() -> None:
    from specops.disaggregated.kv_events import BlockStored, PrefixEvents

    events = PrefixEvents()
    folder = model_dir()
    modules = tuple((name, str(folder / name)) for name in names()[:2])
    config = EngineConfig(model=str(folder / "model"), lora_modules=modules, device="cpu")
    ours = Engine(config, on_prefix=events)
    for adapter in (None, "lora0", "lora1"):
        ours.generate([PROMPT], params(0, cache_salt="lora0"), adapter=adapter)
    stored = [one for one in events.events if isinstance(one, BlockStored)]
    assert [one.lora_name for one in stored] == [None] * 3 + ["lora0"] * 3 + ["lora1"] * 3
    assert len({one.block_hashes[0] for one in stored}) == 9


def test_answers_of_adapters_are_audited() -> None:
    ours = engine(["lora0", "lora1"])
    asked = params(1)
    (done,) = ours.generate([PROMPT], asked, adapter="lora0")
    digests = ours.adapters
    record = AuditRecord.of(done, asked, contract="this", adapter=digests["lora0"])
    record = AuditRecord.from_dict(record.as_dict())
    (verdict,) = audit(ours, [record], contract="this")
    assert verdict.is_confirmed and verdict.same_contract
    for adapter in (None, digests["lora1"]):
        (verdict,) = audit(ours, [replace(record, adapter=adapter)], contract="this")
        assert not verdict.is_confirmed and verdict.same_contract is False
    ours.unload_adapter("lora0")
    with pytest.raises(ValueError, match=r"record.adapter must be the digest of a loaded adapter"):
        audit(ours, [record])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.fast("deepseek_v3", "qwen3_next", ci=("*",))
def test_adapters_of_families(tmp_path: Path, family: str) -> None:
    """Their values, and that other requests, drafts and cached prefixes change no bit."""
    (model := tmp_path / "model").mkdir()
    theirs = make_experts(model, family)
    write_tokenizer(model)
    adapter = write_adapter(tmp_path / "one", model, 5, modules=EVERY)
    config = EngineConfig(model=str(model), lora_modules=(("one", str(adapter)),), device="cpu")
    ours = Engine(config)
    (done,) = ours.generate([PROMPT], params(0, max_tokens=1, logprobs=20), adapter="one")
    merge(theirs, adapter)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    found = done.logprobs[0].alternatives
    assert max(abs(value - expected[token].item()) for token, value in found) < 2e-5
    ours.load_adapter("two", write_adapter(tmp_path / "two", model, 6, modules=("o_proj",)))
    requests: list[tuple[str | None, int]] = [("one", 0), (None, 0), ("two", 0), ("one", 1)]
    each = [run(ours, [request], PLAIN)[0] for request in requests]
    assert len({str(one) for one in each}) == 4
    assert each[1] == run(Engine(replace(config, lora_modules=())), [(None, 0)], NGRAM)[0]
    for speculative in (PLAIN, NGRAM):
        assert run(ours, requests, speculative) == each
    assert ours.stats.prefix_cache_hits > 0


@pytest.mark.parametrize(
    ("family", "part", "module"),
    [
        ("qwen3", "gate_proj", "mlp.experts.0.gate_proj"),
        ("qwen3", "gate", "mlp.gate"),
    ],
)
def test_other_projections_are_refused(tmp_path: Path, family: str, part: str, module: str) -> None:
    (model := tmp_path / "model").mkdir()
    make_experts(model, family)
    write_tokenizer(model)
    own = write_adapter(tmp_path / "one", model, 5, modules=(part,), experts=".experts." in module)
    ours = Engine(EngineConfig(model=str(model), enable_lora=True, device="cpu"))
    with pytest.raises(ModelError, match=f"{module} cannot be adapted; of this model, .*o_proj"):
        ours.load_adapter("one", own)


BAD_FIELDS = [
    ({"peft_type": "IA3"}, "peft_type must be LORA, got 'IA3'"),
    ({"use_dora": True}, r"DoRA \(use_dora\) is not supported: it must be absent, false or empty"),
    ({"bias": "all"}, "bias is not supported: it must be 'none', got 'all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is not supported"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is not supported"),
    ({"field_of_tomorrow": 3}, "field_of_tomorrow is not supported"),
    ({"r": 0}, "r must be an integer of at least 1, got 0"),
    ({"r": 99}, "must be at most max_lora_rank=16, got 99; raise max_lora_rank"),
    ({"r": 5}, r"lora_A of .* must be \[5, 96\], got \[4, 96\]"),
    ({"lora_alpha": "x"}, "lora_alpha must be a number"),
    ({"lora_alpha": None}, "lora_alpha must be a number"),
    ({"rank_pattern": {".*q_proj": 2}}, "rank_pattern must have names of modules as keys"),
]


@pytest.mark.parametrize("fields,message", BAD_FIELDS)
def test_unsupported_configurations_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    adapter = write_adapter(tmp_path / "lora", model_dir() / "model", 0)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ModelError, match=f"adapter 'one' of .*lora: .*{message}"):
        adaptable().load_adapter("one", adapter)


@cache
def adaptable() -> Engine:
    return engine(enable_lora=True)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    def refuse(message: str) -> None:
        with pytest.raises(ModelError, match=message):
            adaptable().load_adapter("one", adapter)

    adapter = write_adapter(tmp_path / "lora", model_dir() / "model", 0)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    rest = {name: tensor for name, tensor in tensors.items() if name != first}
    cases = {
        "q_proj lacks lora_A": rest,
        "tensor base_model.model.lm_head.weight is not supported": {
            **tensors,
            "base_model.model.lm_head.weight": torch.zeros(4, 4),
        },
        "module lm_head cannot be adapted": {
            **tensors,
            "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64),
        },
        "must be a matrix of bfloat16, float16 or float32, got int8": {
            **rest,
            first: torch.zeros(4, 64, dtype=torch.int8),
        },
        "has two adapters": {
            **tensors,
            "layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64),
        },
        "holds no tensors": {},
    }
    for message, changed in cases.items():
        save_file(changed, file)
        refuse(message)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    refuse("is a git-lfs pointer")
    file.write_bytes(b"x" * 100)
    refuse("is not a safetensors file")
    file.rename(adapter / "adapter_model.bin")
    refuse("adapter_model.safetensors is missing; adapter_model.bin is a pickled file")
    for text, message in (("[", "is not valid JSON"), ("3", "must be a JSON object, got int")):
        (adapter / "adapter_config.json").write_text(text)
        refuse(message)
    (adapter / "adapter_config.json").unlink()
    refuse("adapter_config.json cannot be read: No such file")


def test_names_and_settings_are_checked() -> None:
    folder = model_dir()
    for config, message in (
        ({"lora_modules": "x"}, "lora_modules must be pairs of a name and a path, got 'x'"),
        ({"lora_modules": (("a", ""),)}, "lora_modules must be pairs"),
        ({"lora_modules": (("a", "b"), ("a", "c"))}, "must have different names, got 'a' twice"),
        ({"max_lora_rank": 0}, "max_lora_rank must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(**config)
    with pytest.raises(ValueError, match="must be free, got 'model', which is in use"):
        adaptable().load_adapter("model", folder / "lora0")
    with pytest.raises(ValueError, match="adapters need an engine with enable_lora"):
        engine().load_adapter("one", folder / "lora0")


METHODS: tuple[dict[str, Any], ...] = (
    PLAIN,
    NGRAM,
    {"method": "suffix", "num_speculative_tokens": 6},
    {"method": "mtp", "num_speculative_tokens": 2},
    {"method": "mtp+ngram", "num_speculative_tokens": 4, "num_model_steps": 1},
)


def campaign(folder: Path, count: int, num_adapters: int) -> None:
    """Compare requests of the bundled model and of adapters with each one alone.

    Arrivals, aborts, preemption and methods are drawn. Draft heads are those of the model.
    """
    choices: list[str | None] = [None]
    for index in range(num_adapters):
        write_adapter(
            folder / f"lora{index}",
            BUNDLED_MODEL,
            index,
            modules=(ATTENTION, MLP, ("q_proj", "v_proj", "up_proj"))[index // 2 % 3],
            rank=4 << index // 2 % 3,
            dtype=torch.bfloat16,
        )
        choices.append(f"lora{index}")

    def engine_of(adapters: Sequence[str | None], **config: Any) -> Engine:
        modules = tuple((name, str(folder / name)) for name in adapters if name is not None)
        config.setdefault("num_pages", 48)
        return Engine(
            EngineConfig(
                lora_modules=modules, device="cpu", num_threads=1, max_model_len=128, **config
            )
        )

    drawn = random.Random(0)
    requests = [(drawn.choice(choices), drawn.randrange(count // 10)) for _ in range(count)]
    once: dict[tuple[str | None, int], Any] = {}
    for name in choices:
        single = engine_of([name], max_num_seqs=1, methods=())
        for key in sorted({one for one in requests if one[0] == name}, key=str):
            once[key] = run(single, [key], PLAIN)[0]
    for index in {index for _, index in once}:  # every adapter changes the answer
        answers = [str(answer) for (_, other), answer in once.items() if other == index]
        assert len(set(answers)) == len(answers)
    ours = engine_of(choices, num_pages=14, max_num_seqs=12, max_waiting=count, methods=("mtp",))
    ids: dict[str, tuple[str | None, int]] = {}
    num_compared = 0
    while requests or ours.has_unfinished():
        for name, index in [requests.pop() for _ in range(min(len(requests), drawn.randrange(4)))]:
            request_id = ours.add_request(
                prompt_of(index),
                params(index),
                speculative_config=drawn.choice(METHODS),
                adapter=name,
            )
            ids[request_id] = name, index
        if ids and not drawn.randrange(20):
            aborted = drawn.choice(sorted(ids))
            ours.abort(aborted)
            requests.append(ids.pop(aborted))
        for output in ours.step():
            if output.finish_reason is not None:
                key = ids.pop(output.request_id)
                assert bits(ours.completion(output.request_id)) == once[key], key
                num_compared += 1
    assert num_compared == count and ours.num_free_pages == ours.num_pages
    stats = ours.stats
    assert stats.num_preemptions and stats.prefix_cache_hits
    assert stats.speculative.num_accepted_tokens
    assert not any(stats.drafter_failures.values())


def test_requests_of_every_method_have_the_bits_of_each_one_alone(tmp_path: Path) -> None:
    campaign(tmp_path, 40, 2)


@pytest.mark.slow
def test_thousand_requests_have_the_bits_of_each_one_alone(tmp_path: Path) -> None:
    campaign(tmp_path, 1000, NUM_ADAPTERS)
