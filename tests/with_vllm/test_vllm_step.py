# SPDX-License-Identifier: Apache-2.0
"""The sampling step alone, on stand-ins for both runners: drafts change no token and no bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specops.integrations.vllm.hooks import HOOKS, SECOND_RUNNER
from torch import Tensor

VOCAB, LENGTH = 60, 12


def runner(texts: list[list[int]], every: list[Any], mode: str, num_logprobs: int | None) -> Any:
    """Return a runner between two steps. The first two tokens of each text are the prompt."""
    token_ids = torch.zeros(len(texts), LENGTH, dtype=torch.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    names = [f"r{row}" for row in range(len(texts))]
    return SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=names,
            generators={0: "one that vLLM made"},
            num_tokens_no_spec_cpu_tensor=torch.tensor([len(text) for text in texts]),
            token_ids_cpu_tensor=token_ids,
            sampling_metadata=SimpleNamespace(max_num_logprobs=num_logprobs),
        ),
        requests={
            name: SimpleNamespace(num_prompt_tokens=2, sampling_params=params)
            for name, params in zip(names, every, strict=True)
        },
        sampler=SimpleNamespace(logprobs_mode=mode),
        model_config=SimpleNamespace(seed=0),
    )


def test_every_field_that_is_read_is_checked_by_a_hook() -> None:
    """The stand-in has what the step reads and nothing more."""
    given = runner([[1]], [None], "raw_logprobs", None)
    hooks = [hook for hook in HOOKS if hook.part != SECOND_RUNNER]
    names = {hook.target.partition(":")[2]: set(hook.names) for hook in hooks}
    assert vars(given).keys() <= names["GPUModelRunner"]
    assert vars(given.input_batch).keys() == names["InputBatch"]
    assert vars(given.input_batch.sampling_metadata).keys() == names["SamplingMetadata"]
    assert vars(given.requests["r0"]).keys() == names["CachedRequestState"]
    assert vars(given.sampler).keys() == names["Sampler"]
    assert "seed" in names["ModelConfig"]


def params() -> list[Any]:
    from vllm import SamplingParams

    return [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=3, top_k=20),
        SamplingParams(temperature=1.5, seed=4, repetition_penalty=1.4, frequency_penalty=0.2),
        SamplingParams(temperature=0.8, min_tokens=4, stop_token_ids=list(range(30))),
    ]


def metadata(drafts: list[list[int]]) -> Any:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    return SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))


def chosen(output: Any) -> tuple[list[list[int]], list[list[Any]]]:
    """Return the tokens of each request as vLLM reads them, with logprobs, ids and ranks."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    tokens, lists = RejectionSampler.parse_output(
        output.sampled_token_ids, VOCAB, logprobs_tensors=output.logprobs_tensors
    )
    found = []
    for row, text in enumerate(tokens):
        one = lists.slice_request(row, len(text))
        found.append(
            [
                one.logprob_token_ids.tolist(),
                one.logprobs.tolist(),
                one.sampled_token_ranks.tolist(),
            ]
        )
    return tokens, found


def plain_steps(texts: list[list[int]], logits: Tensor, mode: str) -> tuple[Any, Any]:
    """Run three steps without drafts; return the tokens and logprobs of each request."""
    from specops.integrations.vllm.sample_step import sample_step

    texts, every = [list(text) for text in texts], params()
    tokens: list[list[int]] = [[] for _ in texts]
    found: list[list[list[Any]]] = [[[], [], []] for _ in texts]
    for step in range(3):
        output = sample_step(runner(texts, every, mode, 2), logits[step::3].contiguous(), None)
        assert output.sampled_token_ids.shape == (len(texts), 1)
        lists = output.logprobs_tensors.tolists()
        for row, token in enumerate(output.sampled_token_ids[:, 0].tolist()):
            texts[row].append(token)
            tokens[row].append(token)
            for kept, new in zip(found[row], lists.slice_request(row, 1)[:3], strict=True):
                kept.extend(new.tolist())
    return tokens, found


TEXTS = [[5, 6, 7], [8, 9], [7, 7, 7, 3, 3], [1, 2, 3]]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_change_no_token_and_no_bit(mode: str, dtype: torch.dtype) -> None:
    from specops.integrations.vllm.sample_step import sample_step

    generator = torch.Generator().manual_seed(8)
    logits = (3 * torch.randn(12, VOCAB, generator=generator)).to(dtype)
    tokens, found = plain_steps(TEXTS, logits, mode)
    right = [text[:2] for text in tokens]
    wrong = [[text[0], (text[1] + 1) % VOCAB] for text in tokens]
    for drafts, accepted in ((right, 3), (wrong, 2)):
        given = runner(TEXTS, params(), mode, 2)
        got, logprobs = chosen(sample_step(given, logits, metadata(drafts)))
        assert got == [text[:accepted] for text in tokens]
        assert logprobs == [[kept[:accepted] for kept in one] for one in found]
        assert given.input_batch.generators == {}


def test_requests_without_drafts_run_beside_others() -> None:
    from specops.integrations.vllm.sample_step import sample_step

    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2))
    alone = sample_step(runner(TEXTS, params(), "raw_logprobs", None), logits[[0, 1, 4, 5]], None)
    first = alone.sampled_token_ids[:, 0].tolist()
    drafts = [[], [59, 58], [], []]
    together = sample_step(runner(TEXTS, params(), "raw_logprobs", None), logits, metadata(drafts))
    assert together.sampled_token_ids[:, 0].tolist() == first
    assert together.logprobs_tensors is None


def excess(counts: Tensor, expected: Tensor) -> float:
    """Return by how many standard deviations chi-square exceeds its mean, over frequent cells."""
    kept = expected > 5
    chi_square = float((((counts - expected) ** 2) / expected)[kept].sum())
    freedom = int(kept.sum()) - 1
    return (chi_square - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("strategy", ["target_match", "rejection", "block"])
def test_drafts_do_not_change_the_sampled_distribution(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample two tokens for many seeds.

    The second one follows an accepted draft or is sampled in a step of its own. Both tokens
    together have the distribution of the model, filters included.
    """
    from specops.integrations.vllm.sample_step import sample_step
    from vllm import SamplingParams

    monkeypatch.setenv("SPECOPS_VLLM_VERIFY", strategy)
    count, k = 4000, 6
    every = [SamplingParams(temperature=0.9, seed=seed, top_k=k) for seed in range(count)]
    logits = 2 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    probs = torch.zeros(2, VOCAB)
    for row in range(2):
        values, ids = (logits[row] / 0.9).topk(k)
        probs[row, ids] = values.softmax(0)
    draft = [int(probs[0].topk(2).indices[1]), int(probs[1].argmax())]
    texts = [[5, 6, 7]] * count
    drafted = runner(texts, every, "raw_logprobs", None)
    output = sample_step(drafted, logits.repeat(count, 1), metadata([draft] * count))
    tokens = [[token for token in row if token >= 0] for row in output.sampled_token_ids.tolist()]
    first = torch.tensor([text[0] for text in tokens])
    assert excess(first.bincount(minlength=VOCAB), count * probs[0]) < 5
    accepted = [text for text in tokens if text[0] == draft[0] and len(text) > 1]
    assert 0.8 < len(accepted) / (count * float(probs[0, draft[0]])) < 1.2
    second = torch.tensor([text[1] for text in accepted])
    assert excess(second.bincount(minlength=VOCAB), len(accepted) * probs[1]) < 5


@pytest.mark.parametrize("strategy", ["rejection", "block"])
def test_greedy_requests_equal_plain_decoding_under_every_strategy(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specops.integrations.vllm.sample_step import sample_step
    from vllm import SamplingParams

    monkeypatch.setenv("SPECOPS_VLLM_VERIFY", strategy)
    every = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=1)]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    best = logits.argmax(dim=1).tolist()
    wrong = (best[1] + 1) % VOCAB
    given = runner(TEXTS[:2], every, "raw_logprobs", 2)
    tokens, _ = chosen(sample_step(given, logits, metadata([[best[0], wrong], []])))
    assert tokens[0] == best[:2] and len(tokens[1]) == 1


def test_batch_is_read_again_when_it_changes() -> None:
    from specops.integrations.vllm import step_requests
    from specops.integrations.vllm.sample_step import sample_step

    every, logits = params(), torch.randn(4, VOCAB)
    one = runner(TEXTS, every, "raw_logprobs", None)
    sample_step(one, logits, None)
    kept = one._specops_batch
    sample_step(one, logits, None)
    assert one._specops_batch is kept
    one.input_batch.req_ids.reverse()
    sample_step(one, logits, None)
    assert one._specops_batch is not kept
    assert [row.request_id for row in step_requests.rows()] == ["r3", "r2", "r1", "r0"]


class SecondRunner:
    """Stand-in for vLLM's V2 model runner: the state has the requests in reverse order."""

    def __init__(self, texts: list[list[int]], every: list[Any], num_logprobs: int) -> None:
        from specops.integrations.vllm.v2_sampler import SpecopsSampler

        count = len(texts)
        self.indices = list(reversed(range(count)))
        self.lens = [len(text) for text in texts]
        token_ids = torch.zeros(count, LENGTH, dtype=torch.int32)
        for index, text in zip(self.indices, texts, strict=True):
            token_ids[index, : len(text)] = torch.tensor(text, dtype=torch.int32)
        self.model_config = SimpleNamespace(seed=0)
        self.req_states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=token_ids),
            prompt_len=SimpleNamespace(np=torch.full((count,), 2).numpy()),
            prefill_len=SimpleNamespace(gpu=torch.full((count,), 2, dtype=torch.int32)),
        )
        states = SimpleNamespace(
            add_request=lambda index, params: None, max_num_logprobs=lambda rows: num_logprobs
        )
        self.sampler: Any = SimpleNamespace(sampling_states=states, logprobs_mode="raw_logprobs")
        self.sampler = SpecopsSampler(self)
        for index, params in zip(self.indices, every, strict=True):
            self.sampler.add_request(index, params)

    def step(self, logits: Tensor, drafts: list[list[int]], invalid: Tensor | None = None) -> Any:
        starts = torch.tensor([0, *(1 + len(found) for found in drafts)]).cumsum(0)
        lens = [length + len(found) for length, found in zip(self.lens, drafts, strict=True)]
        batch = SimpleNamespace(
            num_reqs=len(drafts),
            req_ids=[f"r{row}" for row in range(len(drafts))],
            idx_mapping_np=torch.tensor(self.indices).numpy(),
            cu_num_logits_np=starts.to(torch.int32).numpy(),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            input_ids=torch.tensor([token for found in drafts for token in (7, *found)]),
            logits_indices=torch.arange(int(starts[-1])),
        )
        return self.sampler(logits, batch, None, invalid)


def test_second_runner_has_the_bits_of_the_first() -> None:
    """A draft that a grammar forbids ends the accepted ones, although it is right."""
    from specops.integrations.vllm.sample_step import sample_step

    logits = 3 * torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(8))
    tokens, found = plain_steps(TEXTS, logits, "raw_logprobs")
    drafts = [text[:2] for text in tokens]
    first = sample_step(runner(TEXTS, params(), "raw_logprobs", 2), logits, metadata(drafts))
    second = SecondRunner(TEXTS, params(), 2).step(logits, drafts)
    assert torch.equal(second.sampled_token_ids, first.sampled_token_ids)
    assert second.num_sampled.tolist() == [3] * 4 and second.num_rejected.tolist() == [0] * 4
    for row, kept in enumerate(found):
        lists = second.logprobs_tensors.tolists().slice_request(row, 3)
        assert [one.tolist() for one in lists[:3]] == kept
    invalid = torch.tensor([False, False, True] + [False] * 6 + [False, True, True])
    third = SecondRunner(TEXTS, params(), 2).step(logits, drafts, invalid)
    assert third.num_sampled.tolist() == [2, 3, 3, 1]
    assert third.num_rejected.tolist() == [1, 0, 0, 2]
    kept = [text[:count] for text, count in zip(tokens, [2, 3, 3, 1], strict=True)]
    assert [
        [token for token in row if token >= 0] for row in third.sampled_token_ids.tolist()
    ] == kept


def test_incomplete_prompt_samples_nothing() -> None:
    second = SecondRunner(TEXTS, params(), -1)
    second.req_states.prefill_len.gpu[second.indices[0]] = 9
    output = second.step(torch.randn(4, VOCAB), [[]] * 4)
    assert output.num_sampled.tolist() == [0, 1, 1, 1] and output.num_rejected.tolist() == [0] * 4
    assert output.logprobs_tensors is None
