# SPDX-License-Identifier: Apache-2.0
"""A draft model: drafts equal its own decoding, and outputs equal plain decoding."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, write_tokenizer
from fake_gpu import FakeGpu
from safetensors.torch import load_file, save_file
from specops.api.config import BUNDLED_MODEL
from specops.api.errors import ModelError
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from test_lossless import bits, params, prompts
from torch import Tensor

COUNT = 10


def make(model: str | Path | None = None, *, target: Path | None = None, **config: Any) -> Engine:
    limits = {
        name: config.pop(name) for name in list(config) if name in EngineConfig.__annotations__
    }
    own = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(model), **config}
    speculative = SpeculativeConfig.from_dict(own) if model is not None else SpeculativeConfig()
    directory = None if target is None else str(target)
    return Engine(
        EngineConfig(device="cpu", model=directory, speculative_config=speculative, **limits)
    )


@pytest.fixture(scope="module")
def similar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a copy of the bundled model with noise, whose drafts are often accepted."""
    directory = tmp_path_factory.mktemp("similar")
    for file in BUNDLED_MODEL.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, directory)
    generator = torch.Generator().manual_seed(1)
    for file in BUNDLED_MODEL.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
                tensors[name] = (tensor.float() + 0.15 * noise).to(tensor.dtype)
        save_file(tensors, directory / file.name, metadata={"format": "pt"})
    return directory


@cache
def plain_outputs() -> tuple[Sequence[str], Sequence[SamplingParams], Sequence[Completion]]:
    """Return prompts, alternately greedy and seeded, and the outputs of plain decoding."""
    texts = prompts()[:COUNT]
    each = [replace(params(i, 0.8 * (i % 2)), max_tokens=48) for i in range(COUNT)]
    return texts, each, make(max_num_seqs=COUNT).generate(texts, each)


CASES: dict[str, dict[str, Any]] = {
    "wide": {"max_num_seqs": COUNT},
    "preempted": {"max_num_batched_tokens": 60, "num_pages": 62},
    "many": {"num_speculative_tokens": 12, "max_num_batched_tokens": 60, "page_size": 32},
    "hybrid": {"method": "draft_model+ngram", "num_model_steps": 2, "num_speculative_tokens": 5},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.fast("preempted", "hybrid")
def test_outputs_equal_plain_decoding(similar: Path, case: str) -> None:
    texts, each, expected = plain_outputs()
    engine = make(similar, **{"max_model_len": 900, "max_num_seqs": 8, **CASES[case]})
    done = engine.generate(texts, each)
    assert list(map(bits, done)) == list(map(bits, expected))
    spec = engine.stats.speculative
    assert 0.1 * spec.num_draft_tokens < spec.num_accepted_tokens < spec.num_draft_tokens
    assert engine.num_free_pages == engine.num_pages and not engine._drafting.num_failures
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in CASES[case])


def reported(engine: Engine, texts: Sequence[Any], each: Sequence[SamplingParams]) -> list[Any]:
    """Return, per request and step with drafts, the tokens before the drafts and the drafts."""
    names = [engine.add_request(*one) for one in zip(texts, each, strict=True)]
    before = dict(zip(names, [list(text) for text in texts], strict=True))
    found: dict[str, list[Any]] = {name: [] for name in names}
    while engine.has_unfinished():
        for one in engine.step():
            text = before[one.request_id]
            if one.drafts is not None:
                found[one.request_id].append((tuple(text), tuple(one.drafts.token_ids)))
            text += one.token_ids
    return list(found.values())


def test_drafts_equal_the_draft_models_own_decoding(similar: Path) -> None:
    """Greedy and seeded requests run in any batch, in chunks and after cached pages."""
    texts, each, _ = plain_outputs()
    reporting = [replace(p, report_drafts=True, max_tokens=24) for p in each[:4]]
    engine = make(similar, max_num_seqs=4, max_num_batched_tokens=50)
    ids = [engine.tokenizer.encode(text)[:90] for text in texts[:4]]
    drafts = reported(engine, ids, reporting)
    again = reported(engine, ids[::-1], reporting[::-1])[::-1]
    assert engine.stats.prefix_cache_hits > 0 and again == drafts
    alone = make(target=similar, max_num_seqs=8)
    for of_request, one in zip(drafts, reporting, strict=True):
        before = [list(text) for text, _ in of_request]
        ahead = replace(one, report_drafts=False, max_tokens=3)
        expected = alone.generate(before, ahead)
        assert len(expected) > 4
        for (_, found), done in zip(of_request, expected, strict=True):
            assert found == tuple(done.token_ids[: len(found)])


def test_target_as_draft_model_is_always_accepted() -> None:
    texts, each, expected = plain_outputs()
    engine = make(BUNDLED_MODEL, max_num_seqs=4, max_num_batched_tokens=64)
    done = engine.generate(texts[:4], each[:4])
    assert list(map(bits, done)) == list(map(bits, expected[:4]))
    spec = engine.stats.speculative
    assert spec.num_accepted_tokens == spec.num_draft_tokens > 100


OWN_PARAMETERS: dict[str, tuple[dict[str, Any], float]] = {
    "bias": ({"logit_bias": dict.fromkeys(range(200, 260), 3.0)}, 1.0),
    "allowed tokens": ({"allowed_token_ids": list(range(5, 4000, 3))}, 1.0),
    "minimum length": ({"min_tokens": 20, "stop_token_ids": list(range(300, 420))}, 1.0),
    "bad words": ({"bad_words_token_ids": [[token] for token in range(200, 400)]}, 1.0),
    "typical": ({"typical_p": 0.5}, 1.0),
    # Penalties of a draft count the text, but not the drafts before it.
    "repetition": ({"repetition_penalty": 1.3}, 0.9),
    "presence": ({"presence_penalty": 0.5}, 0.9),
    "frequency": ({"frequency_penalty": 0.5}, 0.85),
}


@pytest.mark.parametrize("name", OWN_PARAMETERS)
@pytest.mark.slow
def test_drafts_follow_the_parameters_of_their_request(name: str) -> None:
    """Other requests in the batch keep their outputs."""
    own, least = OWN_PARAMETERS[name]
    texts, each, expected = (of_all[:4] for of_all in plain_outputs())
    each = [replace(one, max_tokens=24) for one in each]
    changed = [replace(one, **own) for one in each]
    engine = make(BUNDLED_MODEL, max_num_seqs=8)
    done = engine.generate([*texts, *texts], [*changed, *each])
    spec = [one.stats for one in done[:4]]
    drafts = sum(one.num_draft_tokens for one in spec)
    assert least * drafts <= sum(one.num_accepted_tokens for one in spec)
    assert list(map(bits, done[4:])) == [bits(one)[:24] for one in expected]
    assert not engine._drafting.num_failures
    naive = engine.generate(texts, changed, speculative_config={"method": "naive"})
    assert list(map(bits, done[:4])) == list(map(bits, naive))


def test_drafter_catches_up_after_a_pause(similar: Path) -> None:
    """All tokens of the pause run in one pass."""
    texts, each, _ = plain_outputs()
    engine = make(similar, max_num_seqs=2)
    name = engine.add_request(texts[0], replace(each[0], max_tokens=40, report_drafts=True))
    request = next(iter(engine._scheduler.waiting))
    drafts = []
    while engine.has_unfinished():
        request.drafts.limit = 0 if 3 < len(request.output_token_ids) < 20 else 3
        for one in engine.step():
            drafts += one.drafts.token_ids if one.drafts else ()
    always = make(similar, max_num_seqs=2)
    other = always.add_request(texts[0], replace(each[0], max_tokens=40))
    while always.has_unfinished():
        always.step()
    assert bits(engine.completion(name)) == bits(always.completion(other))
    assert len(drafts) > 15


def test_sampled_drafts_do_not_depend_on_the_batch(similar: Path) -> None:
    """Drafts are sampled under rejection and block."""
    texts, _, _ = plain_outputs()
    each = [replace(params(i, 0.8), max_tokens=30) for i in range(4)]
    engine = make(similar, max_num_seqs=4, verify_strategy="rejection")
    alone = [engine.generate([text], one)[0] for text, one in zip(texts, each, strict=False)]
    assert list(map(bits, engine.generate(texts[:4], each))) == list(map(bits, alone))
    block = [{"verify_strategy": "block"}] * 4
    names = [
        engine.add_request(text, one, speculative_config=own)
        for text, one, own in zip(texts, each, block, strict=False)
    ]
    while engine.has_unfinished():
        engine.step()
    stats = [engine.completion(name).stats for name in names]
    assert all(0 < one.num_accepted_tokens < one.num_draft_tokens for one in stats)


@pytest.mark.parametrize("captures", [True, False], ids=["graphs", "eager"])
@pytest.mark.fast("graphs")
def test_outputs_are_the_same_with_graphs(
    similar: Path, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    texts, each, expected = plain_outputs()
    short = [replace(one, max_tokens=10) for one in each[:2]]
    device = FakeGpu(captures=captures)
    monkeypatch.setattr("specops.engine.engine.open_device", lambda *_, **__: device)
    done = make(similar, max_num_seqs=2).generate(texts[:2], short)
    assert list(map(bits, done)) == [bits(one)[:10] for one in expected[:2]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_checkpoint(directory, "Qwen3")
    write_tokenizer(directory)
    return directory


@pytest.mark.parametrize("family,kv", [("Llama", "int8"), ("Gemma3", "fp8_e4m3")])
def test_other_families_draft_with_8_bit_caches(
    tiny: Path, tmp_path: Path, family: str, kv: str
) -> None:
    make_checkpoint(tmp_path, family, num_hidden_layers=2)
    write_tokenizer(tmp_path)
    each = [replace(params(i, 0.8 * (i % 2)), max_tokens=30) for i in range(4)]
    texts = [[3 + i, 4, 5] * 9 for i in range(4)]
    expected = make(target=tiny, kv_cache_dtype=kv).generate(texts, each)
    engine = make(tmp_path, target=tiny, kv_cache_dtype=kv)
    assert list(map(bits, engine.generate(texts, each))) == list(map(bits, expected))
    assert engine.stats.speculative.num_draft_tokens > 50


def test_draft_model_can_be_quantized(similar: Path) -> None:
    texts, each, expected = plain_outputs()
    engine = make(similar, options={"draft_model": {"quantization": "wint8"}}, max_num_seqs=2)
    head = engine.drafters["draft_model"].head  # type: ignore[attr-defined]
    assert head.model.settings.quantization == "wint8"
    done = engine.generate(texts[:2], each[:2])
    assert list(map(bits, done)) == list(map(bits, expected[:2]))


def changed(source: Path, directory: Path, order: Tensor, **fields: Any) -> Path:
    """Copy a model with these rows of its embedding and LM head, in this order."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    fields = {"vocab_size": len(order), **fields}
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if len(tensor) == 160:
            tensors[name] = tensor[order]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def permuted(source: Path, directory: Path, count: int) -> Path:
    """Copy a model with `count` of its tokens, which have other ids."""
    generator = torch.Generator().manual_seed(2)
    order = torch.cat((torch.tensor([0]), 1 + torch.randperm(159, generator=generator)))[:count]
    changed(source, directory, order)
    file = directory / "tokenizer.json"
    whole = json.loads(file.read_text())
    texts = {i: text for text, i in whole["model"]["vocab"].items()}
    whole["model"]["vocab"] = {texts[old]: new for new, old in enumerate(order.tolist())}
    file.write_text(json.dumps(whole))
    return directory


def outputs_of_drafts(
    tiny: Path, draft: Path, **options: Any
) -> tuple[list[Completion], list[Completion], Engine]:
    """Return completions with and without drafts, and the engine that drafted."""
    each = [replace(params(i, 0.8 * (i % 2)), max_tokens=30) for i in range(4)]
    texts = [[3 + i, 4, 5] * 9 for i in range(4)]
    expected = make(target=tiny).generate(texts, each)
    engine = make(draft, target=tiny, **options)
    return engine.generate(texts, each), expected, engine


def test_models_may_have_other_numbers_of_padding_rows(tiny: Path, tmp_path: Path) -> None:
    """Rows after the target's last one are never drafted; missing rows are read as another."""
    more = torch.arange(200).remainder(160)
    for index, (order, is_target) in enumerate([(more, True), (torch.arange(158), False)]):
        draft = changed(tiny, tmp_path / str(index), order)
        done, expected, engine = outputs_of_drafts(tiny, draft)
        assert list(map(bits, done)) == list(map(bits, expected))
        spec = engine.stats.speculative
        assert spec.num_accepted_tokens > 40 and not engine._drafting.num_failures
        assert (spec.num_accepted_tokens == spec.num_draft_tokens) == is_target


@pytest.mark.parametrize("strategy", ["target_match", "rejection", "block"])
@pytest.mark.parametrize("count", [160, 120])
@pytest.mark.fast("120-target_match", "160-rejection")
def test_models_may_have_other_vocabularies(
    tiny: Path, tmp_path: Path, count: int, strategy: str
) -> None:
    """A copy of the target with other ids drafts what the target decodes, if it has the token."""
    draft = permuted(tiny, tmp_path / "draft", count)
    done, expected, engine = outputs_of_drafts(tiny, draft, verify_strategy=strategy)
    pairs = list(zip(done, expected, strict=True))
    assert all(bits(one) == bits(other) for one, other in pairs[::2])  # greedy
    if strategy == "target_match":
        assert all(bits(one) == bits(other) for one, other in pairs)
    spec = engine.stats.speculative
    assert spec.num_accepted_tokens > 40 and not engine._drafting.num_failures
    assert (spec.num_accepted_tokens == spec.num_draft_tokens) == (count == 160)


def test_models_with_a_shorter_context_pause(tiny: Path, tmp_path: Path) -> None:
    draft = changed(tiny, tmp_path / "draft", torch.arange(160), max_position_embeddings=40)
    engine = make(draft, target=tiny, max_num_batched_tokens=16, max_num_seqs=2)
    plain = make(target=tiny)
    each = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=1)
    for prompt, has_drafts in (([3, 4, 5] * 9, True), ([3, 4, 5] * 15, False)):
        before = engine.stats.speculative.num_draft_tokens
        (found,) = engine.generate([prompt], replace(each, report_drafts=True))
        assert bits(found) == bits(plain.generate([prompt], each)[0])
        drafts = engine.stats.speculative.num_draft_tokens - before
        assert (0 < drafts <= 3 * (40 - len(prompt))) == has_drafts and (drafts > 0) == has_drafts
    hits = engine.stats.prefix_cache_hits
    engine.generate([[3, 4, 5] * 15], each)
    # Long prompts share all whole pages, although these have no draft KV.
    assert engine.stats.prefix_cache_hits == hits + 32
    assert not engine._drafting.num_failures


def test_models_may_be_gguf_files(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from gguf_files import make_file

    file = make_file(tmp_path, "qwen3moe")
    engine = make(file, target=file)
    engine.generate([[3, 4, 5] * 9], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    spec = engine.stats.speculative
    assert spec.num_accepted_tokens == spec.num_draft_tokens > 10


def no_common_token(directory: Path) -> None:
    file = directory / "tokenizer.json"
    whole = json.loads(file.read_text())
    whole["model"]["vocab"] = {"<|none|>": 0}
    whole["model"]["unk_token"], whole["added_tokens"] = "<|none|>", []
    file.write_text(json.dumps(whole))


def without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "change,message",
    [
        (no_common_token, r"draft model .*: tokenizer\.json has no token in common with the"),
        (without_weights, r"draft model .*: no model\.safetensors"),
    ],
)
def test_incompatible_draft_models_are_refused(
    tiny: Path, tmp_path: Path, change: Any, message: str
) -> None:
    directory = tmp_path / "draft"
    shutil.copytree(tiny, directory)
    change(directory)
    with pytest.raises(ModelError, match=message):
        make(directory, target=tiny)


def test_missing_draft_model_is_reported(tiny: Path) -> None:
    speculative = SpeculativeConfig(method="draft_model")
    with pytest.raises(ModelError, match="no draft model is named"):
        Engine(EngineConfig(device="cpu", model=str(tiny), speculative_config=speculative))
    engine = make(target=tiny)
    with pytest.raises(ValueError, match='"draft_model" cannot run in this engine'):
        engine.add_request([1], SamplingParams(), speculative_config={"method": "draft_model"})
    with pytest.raises(ValueError, match=r"quantization must be one of .*; got 8"):
        SpeculativeConfig.from_dict({"method": "draft_model", "quantization": 8})
