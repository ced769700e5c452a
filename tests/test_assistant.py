# SPDX-License-Identifier: Apache-2.0
"""Assistant models draft as in transformers, and outputs equal plain decoding."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import BASE, SHARED_KV, make_checkpoint, randomize, write_tokenizer
from fake_gpu import FakeGpu
from specops.api.errors import ModelError
from specops.engine import Engine, EngineConfig, SpeculativeConfig
from specops.engine.models import load_assistant
from test_draft_model import reported
from test_eagle3 import TEXTS, reporting_params
from test_lossless import bits, params

OWN: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "final_logit_softcapping": None,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any, Path, Any]]:
    """Return the directories of a target and its assistant, each with the model.

    transformers 5.23 refuses a model all of whose layers share keys, as assistants do.
    """
    transformers = pytest.importorskip("transformers")
    kind = transformers.Gemma4TextConfig
    modes = kind.kv_sharing_modes.fget

    def modes_of(config: Any) -> list[str | None]:
        is_assistant = config.num_kv_shared_layers == config.num_hidden_layers
        return ["reuse"] * config.num_hidden_layers if is_assistant else modes(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "kv_sharing_modes", property(modes_of))
        yield made(transformers, tmp_path_factory)


def made(transformers: Any, tmp_path_factory: Any) -> tuple[Path, Any, Path, Any]:
    target, assistant = (tmp_path_factory.mktemp(name) for name in ("target", "assistant"))
    model = make_checkpoint(target, "Gemma4", **SHARED_KV)
    write_tokenizer(target)
    text = transformers.Gemma4TextConfig(**{**BASE, **SHARED_KV, **OWN})
    config = transformers.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=64,
        use_ordered_embeddings=True,
        num_centroids=16,
        centroid_intermediate_top_k=16,  # all tokens
    )
    head = transformers.Gemma4AssistantForCausalLM(config).eval()
    randomize(head)
    with torch.no_grad():
        head.masked_embedding.token_ordering.copy_(torch.randperm(160))
    head.save_pretrained(assistant)
    # The masks of assistants in transformers have one key more than the window.
    head.config.get_text_config().sliding_window -= 1
    return target, model, assistant, head


def drafts_of(
    model: Any, head: Any, text: Sequence[int], count: int, *, behind: int = 0
) -> list[int]:
    """Return the most likely drafts after a text.

    `behind` plants a mistake: queries have an earlier position.
    """
    with torch.no_grad():
        known = model(
            torch.tensor([list(text[:-1])]),
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=False,
        )
        state, drafts = known.hidden_states[-1][:, -1:], list(text[-1:])
        for _ in range(count):
            embedded = model.get_input_embeddings()(torch.tensor([drafts[-1:]]))
            found = head(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[len(text) - 1 - behind]]),
                shared_kv_states=known.shared_kv_states,
                use_cache=False,
            )
            state = found.last_hidden_state
            drafts.append(int(found.logits[0, -1].argmax()))
    return drafts[1:]


def make(models: tuple[Path, Any, Path, Any], drafts: int = 3, **config: Any) -> Engine:
    """Return an engine with the assistant; with 0 drafts, one without speculation."""
    own: dict[str, Any] = {"method": "naive"}
    if drafts:
        own = {"method": "mtp", "num_speculative_tokens": drafts, "model": str(models[2])}
    speculative = SpeculativeConfig.from_dict(own)
    return Engine(
        EngineConfig(device="cpu", model=str(models[0]), speculative_config=speculative, **config)
    )


def test_drafts_match_transformers(models: tuple[Path, Any, Path, Any]) -> None:
    """Requests run in a batch and in chunks. A query's position matters."""
    engine = make(models, max_num_seqs=4, max_num_batched_tokens=24)
    compared = other = 0
    for of_request in reported(engine, TEXTS[:3], reporting_params(3)):
        for text, drafts in of_request[:4]:
            assert list(drafts) == drafts_of(*models[1::2], text, len(drafts))
            other += list(drafts) != drafts_of(*models[1::2], text, len(drafts), behind=8)
            compared += 1
    assert compared == 12 and other > 3


CASES: dict[str, dict[str, Any]] = {
    "wide": {},
    "preempted": {"max_num_batched_tokens": 20, "num_pages": 16, "max_model_len": 200},
    "int8": {"kv_cache_dtype": "int8", "drafts": 6, "page_size": 32},
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_plain_decoding(models: tuple[Path, Any, Path, Any], case: str) -> None:
    each = [replace(params(i, 0.8 * (i % 2)), max_tokens=40) for i in range(6)]
    kv = {name: one for name, one in CASES[case].items() if name == "kv_cache_dtype"}
    expected = make(models, drafts=0, max_num_seqs=1, **kv).generate(TEXTS, each)
    engine = make(models, **{"max_num_seqs": 6, **CASES[case]})
    done = engine.generate(TEXTS, each)
    assert list(map(bits, done)) == list(map(bits, expected))
    spec = engine.stats.speculative
    assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens
    assert engine.num_free_pages == engine.num_pages and not engine._drafting.num_failures
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in CASES[case])


def test_captured_steps_draft_the_same(
    models: tuple[Path, Any, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    each = reporting_params(2, 0.8)
    drafts = reported(make(models, max_num_seqs=2), TEXTS[:2], each)
    device = FakeGpu(captures=True)
    monkeypatch.setattr("specops.engine.engine.open_device", lambda *_, **__: device)
    assert reported(make(models, max_num_seqs=2), TEXTS[:2], each) == drafts


@pytest.mark.parametrize(
    "changes,sentence",
    [
        ({"vocab_size": 161}, "vocab_size is 161, but the target has 160"),
        ({"sliding_window": 21}, "the target has no layer with 1 heads of 64 keys and a sliding"),
        ({"num_key_value_heads": 2}, "the target has no layer with 2 heads of 64 keys and a slid"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input must be 0, got 8"),
    ],
)
def test_assistants_that_do_not_fit_are_refused(
    models: tuple[Path, Any, Path, Any], tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    config = json.loads((models[2] / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(models[2] / "model.safetensors")
    with pytest.raises(ModelError, match=sentence):
        make((*models[:2], tmp_path, None))


def test_ranks_are_refused(models: tuple[Path, Any, Path, Any]) -> None:
    """Each rank has only some of the target's keys."""
    target: Any = SimpleNamespace(ranks=SimpleNamespace(size=2))
    with pytest.raises(ModelError, match="assistant models need tensor_parallel_size 1, got 2"):
        load_assistant(target, models[2], num_slots=1)
