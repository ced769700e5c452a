# SPDX-License-Identifier: Apache-2.0
"""Generation in transformers: drafts, batches and padding change no token and no logit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from specops.integrations.transformers_generation import generate, make_exact  # noqa: E402
from test_transformers import SIZES, padded  # noqa: E402

LENS = [31, 7, 50]


def new_model(name: str = "LlamaConfig", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIZES, **more})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(
    params=[("LlamaConfig", "float32"), ("Qwen3Config", "bfloat16"), ("GemmaConfig", "float32")],
    ids="-".join,
)
def model(request: pytest.FixtureRequest) -> Any:
    name, dtype = request.param
    found = new_model(name).to(getattr(torch, dtype))
    make_exact(found)
    return found


class Recorded(transformers.LogitsProcessor):  # type: ignore[misc]
    """Records the logits after each text, and makes likely tokens more likely."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        text = tuple(token for token in input_ids[0].tolist() if token)  # 0 is padding
        before = self.logits.setdefault(text, scores[0].clone())
        assert all(torch.equal(before, row) for row in scores)
        return 60 * scores


@pytest.mark.parametrize("do_sample", [False, True])
def test_drafts_and_batches_change_no_bit(model: Any, do_sample: bool) -> None:
    """The recorder fails if a text has other logits in any of the calls."""
    inputs = padded(LENS)
    recorded = Recorded()

    def answer(num_drafts: int, seed: int = 5, **given: Tensor) -> Tensor:
        found: Tensor = model.generate(
            **given,
            custom_generate=generate,
            num_drafts=num_drafts,
            seed=seed,
            do_sample=do_sample,
            max_new_tokens=24,
            logits_processor=transformers.LogitsProcessorList([recorded]),
        )
        return found

    plain = answer(0, **inputs)
    assert plain.shape == (3, max(LENS) + 24)
    calls: list[int] = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    for num_drafts in (1, 5):
        assert torch.equal(answer(num_drafts, **inputs), plain)
    hook.remove()
    assert len(calls) < 2 * 24, "no draft was accepted"
    for number, length in enumerate(LENS):
        alone = {name: x[number : number + 1, -length:] for name, x in inputs.items()}
        found = answer(3, seed=5 + number, **alone)
        assert torch.equal(found[0], plain[number, -length - 24 :])


def test_greedy_tokens_equal_those_of_transformers() -> None:
    inputs = padded(LENS)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 9}
    model = new_model(eos_token_id=7)
    want = model.generate(**inputs, **options)
    make_exact(model)
    got = model.generate(**inputs, **options, custom_generate=generate)
    assert torch.equal(got, want)


class Mixed(nn.Module):
    """Adds the mean of all rows to each row."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def test_model_whose_rows_depend_on_others_is_refused() -> None:
    model = new_model()
    model.model.norm = nn.Sequential(model.model.norm, Mixed())
    with pytest.raises(ValueError, match="LlamaForCausalLM still depend on the number of rows"):
        make_exact(model)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"num_beams": 2}, "only num_beams=1, got 2"),
        ({"return_dict_in_generate": True}, "only return_dict_in_generate=False, got True"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = new_model()
    make_exact(model)
    with pytest.raises(ValueError, match=message):
        model.generate(
            torch.tensor([[1, 2]]), max_new_tokens=2, custom_generate=generate, **options
        )


def test_sliding_window_is_refused() -> None:
    model = new_model("MistralConfig", sliding_window=24)
    make_exact(model)
    with pytest.raises(ValueError, match="no sliding window, got a model with one of 24"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, custom_generate=generate)
