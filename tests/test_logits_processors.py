# SPDX-License-Identifier: Apache-2.0
"""Logits processors: an op with processors equals the op on logits that were edited in place."""

import itertools
import math
from typing import Any

import pytest
import simt
import specops
import torch
from processor_cases import RULES, only, random_processors, to_device
from sampling_cases import by_field, mixed_params, on_device, positions_from, row_params
from shared_fixtures import expect_fault
from specops import reference, sampling
from specops.sampling import LogitsProcessors, Purpose
from torch import Tensor

pytestmark = pytest.mark.no_bf16

INF = math.inf


def with_typical(params: dict[str, Tensor]) -> dict[str, Tensor]:
    values = torch.tensor([1.0, 1.0, 0.2, 0.9])
    picked = values[torch.randint(4, (len(params["seeds"]),))]
    return {**params, "typical_p": picked}


def run(
    logits: Tensor,
    positions: Tensor,
    params: dict[str, Tensor],
    processors: LogitsProcessors | None = None,
    **more: Any,
) -> list[Tensor]:
    """Return tokens, logprobs, ranks and target probabilities of `sample`, on the CPU."""
    rows, vocab = logits.shape
    device = logits.device
    logprobs = torch.full((rows,), 7.0, device=device)
    ranks = torch.full((rows,), 7, dtype=torch.int32, device=device)
    probs = torch.full((rows, vocab), 7.0, device=device)
    tokens = by_field(sampling.sample)(
        logits,
        positions.to(device),
        **on_device(params, device),
        processors=processors and to_device(processors, device),
        logprobs=logprobs,
        ranks=ranks,
        probs=probs,
        **more,
    )
    return [x.cpu() for x in (tokens, logprobs, ranks, probs)]


def check_as_if_edited(
    logits: Tensor, positions: Tensor, params: dict[str, Tensor], processors: LogitsProcessors
) -> None:
    """Check that `sample` equals that of the edited logits bit for bit; raw scores are unedited."""
    edited = reference.process_logits(logits.cpu(), processors, positions).to(logits.device)
    want = run(edited, positions, params, processed_logprobs=True)
    got = run(logits, positions, params, processors, processed_logprobs=True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    raw = run(logits, positions, params, processors)
    assert torch.equal(raw[0], want[0]) and torch.equal(raw[3], want[3])
    ids, logprobs, _ = sampling.top_logprobs(logits, logits.shape[1])
    of_token = torch.zeros(logits.shape).scatter_(1, ids.cpu().long(), logprobs.cpu())
    assert torch.equal(raw[1], of_token.gather(1, raw[0].long()[:, None])[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows,vocab", [(0, 9), (2, 151_936), (300, 60), (12, 1000), (5, 1), (7, 31), (7, 33)]
)
@pytest.mark.fast("cpu-*", "simt-*-dtype0", "simt-7-*")
@pytest.mark.pairwise
def test_processors_equal_edits_in_place(
    device: str, isa: str, dtype: torch.dtype, rows: int, vocab: int
) -> None:
    logits = (3 * torch.randn(rows, vocab)).to(dtype).to(device)
    positions = torch.randint(0, 20, (rows,), dtype=torch.int32)
    processors = random_processors(rows, rows, vocab, positions)
    check_as_if_edited(logits, positions, with_typical(mixed_params(rows)), processors)


def test_every_combination_of_processors_equals_edited_logits(
    device: str, isa: str, on_cuda: bool
) -> None:
    rows, vocab = 8, 67
    for count in range(0, len(RULES) + 1, 3 if on_cuda else 1):
        for rules in itertools.combinations(RULES, count):
            logits = 3 * torch.randn(rows, vocab)
            positions = torch.randint(0, 20, (rows,), dtype=torch.int32)
            processors = only(random_processors(rows, rows, vocab, positions), set(rules))
            check_as_if_edited(logits.to(device), positions, mixed_params(rows), processors)


def test_processed_sample_equals_the_reference(device: str, isa: str) -> None:
    rows, vocab = 90, 70
    logits = 3 * torch.randn(rows, vocab)
    positions = torch.randint(0, 20, (rows,), dtype=torch.int32)
    processors = random_processors(rows, rows, vocab, positions)
    params = with_typical(mixed_params(rows))
    for processed in (False, True):
        want = [torch.zeros(rows).double(), torch.zeros(rows).int(), torch.zeros(rows, vocab)]
        tokens = by_field(reference.sample)(
            logits,
            positions,
            **params,
            processors=processors,
            processed_logprobs=processed,
            logprobs=want[0],
            ranks=want[1],
            probs=want[2],
        )
        got = run(logits.to(device), positions, params, processors, processed_logprobs=processed)
        assert torch.equal(got[0], tokens) and torch.equal(got[2], want[1])
        torch.testing.assert_close(got[1].double(), want[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(got[3], want[2], rtol=0, atol=1e-6)
        assert torch.equal(got[3] == 0, want[2] == 0)
        torch.testing.assert_close(got[3].sum(1), torch.ones(rows))


def test_processed_rows_keep_their_bits(device: str, isa: str, on_cuda: bool) -> None:
    rows, vocab = 13, 9001
    logits = torch.randn(rows, vocab, device=device)
    positions = torch.randint(0, 20, (rows,), dtype=torch.int32)
    processors, params = random_processors(rows, rows, vocab, positions), mixed_params(rows)
    params = with_typical(params)
    want = run(logits, positions, params, processors, processed_logprobs=True)
    for threads in (1, 2, 3) if not on_cuda else (1,):
        specops.set_num_threads(threads)
        got = run(logits, positions, params, processors, processed_logprobs=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        for row in range(rows):
            own = processors._replace(
                slots=processors.slots[row : row + 1],
                mask_indices=processors.mask_indices[row : row + 1],
            )
            alone = {name: column[row : row + 1] for name, column in params.items()}
            got = run(
                logits[row : row + 1],
                positions[row : row + 1],
                alone,
                own,
                processed_logprobs=True,
            )
            assert all(torch.equal(a[0], b[row]) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processed_rows_may_be_strided(device: str, isa: str, dtype: torch.dtype) -> None:
    wide = torch.full((9, 2300), 1e30, device=device, dtype=dtype)
    wide[:, 101:2134] = torch.randn(9, 2033)
    view = wide[:, 101:2134]
    positions, params = torch.arange(9, dtype=torch.int32), mixed_params(9)
    processors = random_processors(9, 9, 2033, positions)
    got = run(view, positions, params, processors)
    for a, b in zip(got, run(view.contiguous(), positions, params, processors), strict=True):
        assert torch.equal(a, b)
    assert (wide[:, :101] == wide[0, 0]).all() and (wide[:, 2134:] == wide[0, 0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [511, 513, 8201, 1023, 3072, 1025])
@pytest.mark.pairwise
def test_processed_tokens_at_the_ends_of_words_and_leaves(
    device: str, isa: str, dtype: torch.dtype, vocab: int
) -> None:
    """Rows begin at every alignment, beside elements of other rows."""
    logits = (3 * torch.randn(9, vocab + 11)).to(dtype).to(device)[:, 1 : vocab + 1]
    ends = [end + i for end in range(0, vocab, 512) for i in (-1, 0, 1, 7, 8, 31, 32)] + [vocab - 1]
    ids = torch.tensor(sorted({i for i in ends if 0 <= i < vocab}), dtype=torch.int32)
    counts = torch.randint(1, 9, (2, len(ids)), dtype=torch.int32)
    processors = LogitsProcessors(
        slots=torch.randint(2, (9,), dtype=torch.int32),
        counted_token_ids=ids.repeat(2, 1),
        token_counts=counts,
        presence_penalty=torch.tensor([0.7, -0.7]),
        frequency_penalty=torch.tensor([-0.5, 0.5]),
        logit_bias_token_ids=ids.repeat(2, 1),
        logit_bias=4 * torch.randn(2, len(ids)),
    )
    params = row_params(9, temperature=[0.0, 1.0, 1.0] * 3, top_k=[0, 0, 20] * 3)
    check_as_if_edited(logits, positions_from(3, 9), params, processors)


def test_rows_without_allowed_tokens_or_finite_logits(device: str, isa: str) -> None:
    """One row disallows every token; others have NaN and infinities under every rule."""
    vocab = 70
    logits = torch.randn(6, vocab)
    logits[1] = math.nan
    logits[2, ::2] = INF
    logits[3] = -INF
    logits[4, :40] = math.nan
    logits[4, 40:50] = 3e38
    positions = torch.full((6,), 9, dtype=torch.int32)
    processors = random_processors(6, 6, vocab, positions)
    processors.logit_bias[:] = 3e38
    processors.allowed_token_mask[2] = 0
    processors.mask_indices[:] = torch.tensor([2, -1, 0, 1, -1, -1])
    for temperature in (0.0, 1.0):
        params = row_params(6, temperature=temperature, top_p=0.8)
        check_as_if_edited(logits.to(device), positions, params, processors)
        got = run(logits.to(device), positions, params, processors, processed_logprobs=True)
        for row in (0, 1, 3):
            assert int(got[0][row]) == 0 and float(got[1][row]) == -INF
            assert got[3][row].tolist() == [1.0] + [0.0] * (vocab - 1)


def test_ties_after_processing_go_to_the_lower_id(device: str, isa: str) -> None:
    """Biases make logits equal, and equal logits have one rank."""
    logits = torch.zeros(1, 3000, device=device)
    processors = LogitsProcessors(
        slots=torch.zeros(1, dtype=torch.int32),
        logit_bias_token_ids=torch.tensor([[7, 1500, 2999, -1]], dtype=torch.int32),
        logit_bias=torch.tensor([[1.0, 1.0, 2.0, 9.0]]),
    )
    params = row_params(1, temperature=1.0, top_k=2, seeds=4)
    for position in range(40):
        got = run(
            logits, torch.tensor([position]).int(), params, processors, processed_logprobs=True
        )
        assert int(got[0]) in (7, 2999)
        assert int(got[2]) == (2 if int(got[0]) == 7 else 1)


def test_typical_p_retains_the_smallest_typical_set(device: str, isa: str) -> None:
    """The most probable token may be removed while less probable ones stay."""
    probs = torch.tensor([0.5, 0.2, 0.2, 0.1])
    row = probs.log()
    surprise = -row
    entropy = float((probs * surprise).sum())
    assert (surprise - entropy).abs().argsort(stable=True).tolist() == [1, 2, 0, 3]
    for typical_p, retained in ((0.1, [1]), (0.3, [1, 2]), (0.5, [0, 1, 2]), (0.95, [0, 1, 2, 3])):
        params = {**row_params(1), "typical_p": torch.tensor([typical_p])}
        got = run(row[None].to(device), positions_from(0, 1), params)[3][0]
        assert got.nonzero().flatten().tolist() == retained
        want = reference.target_probs(row, 1.0, typical_p=typical_p).float()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("vocab", [7_003, 151_936, 40_003])
@pytest.mark.fast("cpu-*", "simt-7003", "simt-40003")
def test_typical_p_of_large_rows(device: str, isa: str, on_cuda: bool, vocab: int) -> None:
    """Cover more tokens than a list holds, ties among them, and other filters."""
    cases: list[dict[str, Any]] = [
        {"typical_p": 0.3},
        {"typical_p": 0.9, "temperature": 1e3},
        {"typical_p": 0.9, "top_p": 0.95},
        {"typical_p": 0.5, "top_k": 20_000},
        {"typical_p": 0.5, "min_p": 0.01},
        {"typical_p": 0.9999},
    ]
    logits = torch.randn(len(cases), vocab).bfloat16()
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    params = row_params(
        len(cases), **{k: [c.get(k, off) for c in cases] for k, off in defaults.items()}
    )
    params["typical_p"] = torch.tensor([case["typical_p"] for case in cases])
    if on_cuda:
        logits, params = logits[:3], {name: column[:3] for name, column in params.items()}
    got = run(logits.to(device), positions_from(3, len(logits)), params)[3].double()
    for i, row in enumerate(logits):
        filters = {name: params[name][i].item() for name in (*defaults, "typical_p")}
        want = reference.target_probs(row, **filters)
        assert abs(float(got[i].sum()) - 1.0) < 1e-5
        # sums in fp32 may end a token or two later, a hundredth of a percent of the mass
        assert (got[i] - want).abs().sum() < 2e-4


def typical_row(kind: str, vocab: int) -> Tensor:
    """Return logits of which typical-p retains few tokens, many, or more ties than a list holds."""
    row = torch.randn(vocab)
    if kind == "flat":
        return 0.2 * row
    if kind == "peaked":
        return 5 * row
    if kind == "tied":
        return row.sign()
    if kind == "rounded":
        return (4 * row).round() / 2
    if kind == "tail":
        row[: vocab // 2] = -INF
        row[vocab // 3 : vocab // 2] = math.nan
    return 2 * row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["flat", "spread", "peaked", "tied", "rounded", "tail"])
@pytest.mark.fast("cpu-*", "simt-*-dtype1", "simt-tied-dtype0")
@pytest.mark.pairwise
def test_typical_p_retains_the_tokens_nearest_to_the_mean_surprise(
    device: str, isa: str, kind: str, dtype: torch.dtype
) -> None:
    """The retained tokens are the fewest with a mass of at least typical_p."""
    vocab, masses = 20_011, [0.02, 0.3, 0.8, 0.995]
    logits = torch.stack([typical_row(kind, vocab)] * len(masses)).to(dtype)
    params = row_params(len(masses), temperature=0.75, top_k=[0, 0, 9000, 0])
    params["typical_p"] = torch.tensor(masses)
    probs = run(logits.to(device), positions_from(3, len(masses)), params)[3]
    for i, required in enumerate(masses):
        x = logits[i].float().nan_to_num(-INF, neginf=-INF)
        if params["top_k"][i] > 0:  # ties to the lower id
            x[x.argsort(descending=True, stable=True)[9000:]] = -INF
        surprise = (x.max() - x) / params["temperature"][i]
        weights = (-surprise.double()).exp()
        weights /= weights.sum()
        mean = (weights * surprise.double()).nan_to_num(0.0).sum().float()
        retained = probs[i] > 0
        assert abs(float(probs[i].double().sum()) - 1.0) < 1e-5
        distance = (surprise - mean).abs().double()
        furthest, nearest = distance[retained].max(), distance[~retained & (weights > 0)].min()
        assert furthest <= nearest + 1e-5
        mass, last = (
            weights[retained].sum(),
            weights[retained & (distance >= furthest - 1e-5)].max(),
        )
        assert required - 1e-5 <= mass < required + last + 1e-5
        # of equal logits, the lower ids are retained
        for value in x[retained & (distance >= furthest - 1e-5)].unique():
            tied = (x == value).nonzero().flatten()
            stays = retained[tied]
            assert not (stays[1:] & ~stays[:-1]).any()


def test_drafts_and_anchored_tokens_have_their_own_uniforms(device: str, isa: str) -> None:
    logits = torch.zeros(64, 4096, device=device)
    positions, params = positions_from(0, 64), row_params(64, seeds=9)
    drafts = run(logits, positions, params, purpose=Purpose.DRAFT)[0]
    for position, token in enumerate(drafts.tolist()):
        assert token == int(reference.philox_uniform(9, position, 0) * 4096)
    anchors = positions_from(1, 64)
    anchored = run(logits, positions, params, anchors=anchors.to(device))[0]
    for position, token in enumerate(anchored.tolist()):
        uniform = reference.philox_uniform(9, position, 3, 0, 0, position + 1)
        assert token == int(uniform * 4096)


# ---- top_logprobs of processed logits ----


def chains_of(batch: int, k: int, vocab: int) -> dict[str, Tensor]:
    """Return requests with up to k drafts, some idle; drafts without a row are out of range."""
    drafts = torch.randint(vocab, (batch, k), dtype=torch.int32)
    lens = torch.randint(0, k + 2, (batch,))
    indptr = torch.cat([torch.zeros(1), lens.cumsum(0)]).int()
    drafts[torch.arange(k)[None] >= lens[:, None] - 1] = 2**30
    return {"output_indptr": indptr, "draft_token_ids": drafts}


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("batch,k,vocab,n", [(9, 3, 90, 7), (4, 2, 5000, 30), (3, 0, 40, 40)])
@pytest.mark.pairwise
def test_processed_top_logprobs(
    device: str, isa: str, tree: bool, batch: int, k: int, vocab: int, n: int
) -> None:
    """The scores of a row equal those of a call of `sample` on the processed logits of that row."""
    step = chains_of(batch, k, vocab)
    if tree:
        step["parents"] = (
            torch.tensor([[int(torch.randint(-1, j, ())) for j in range(k)] for _ in range(batch)])
            .int()
            .view(batch, k)
        )
    rows = int(step["output_indptr"][-1]) + 2  # the last two belong to no request
    logits = 3 * torch.randn(rows, vocab)
    positions = torch.randint(0, 20, (batch,), dtype=torch.int32)
    processors = random_processors(batch, rows, vocab, positions, step["draft_token_ids"])
    params = with_typical(mixed_params(batch))
    del params["seeds"], params["choice_index"]
    ranks = torch.zeros(rows, n, dtype=torch.int32, device=device)
    got = by_field(sampling.top_logprobs)(
        logits.to(device),
        n,
        processed_logprobs=True,
        **on_device({**step, "positions": positions, **params}, device),
        processors=to_device(processors, device),
        ranks=ranks,
    )
    edited = by_field(reference.process_logits)(logits, processors, positions, **step)
    request = torch.repeat_interleave(torch.arange(batch), step["output_indptr"].diff())
    plain = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    own = {
        name: torch.cat([column[request], column.new_full((2,), plain[name])])
        for name, column in params.items()
    }
    want_ranks = torch.zeros(rows, n, dtype=torch.int32)
    want = by_field(reference.top_logprobs)(
        logits,
        n,
        processed_logprobs=True,
        **step,
        positions=positions,
        **params,
        processors=processors,
        ranks=want_ranks,
    )
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(ranks.cpu(), want_ranks)
    torch.testing.assert_close(got[1].cpu(), want[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(got[2].cpu(), want[2], rtol=0, atol=4e-6)
    assert torch.equal(got[2], sampling.top_logprobs(logits.to(device), 0)[2])
    # bits equal those of `sample` where it chooses one of these tokens
    params = {**own, "seeds": torch.arange(rows)}
    choice = run(edited.to(device), torch.zeros(rows).int(), params, processed_logprobs=True)
    found = got[0].cpu() == choice[0][:, None]
    assert found.any()
    assert torch.equal(got[1].cpu()[found], choice[1][found.any(1)])
    assert torch.equal(ranks.cpu()[found], choice[2][found.any(1)])


def test_top_logprobs_ranks_of_raw_logits(device: str, isa: str) -> None:
    logits = torch.randn(5, 900).round(decimals=1).to(device)
    ranks = torch.zeros(5, 40, dtype=torch.int32, device=device)
    want = torch.zeros(5, 40, dtype=torch.int32)
    sampling.top_logprobs(logits, 40, outputs=sampling.TopLogprobsOutputs(ranks=ranks))
    reference.top_logprobs(logits.cpu(), 40, outputs=sampling.TopLogprobsOutputs(ranks=want))
    assert torch.equal(ranks.cpu(), want)


# ---- invalid values ----


@pytest.mark.parametrize(
    "field,value,message",
    [
        ("slots", 4, r"processors\.slots.* must be -1 or below num_slots.*, got"),
        ("slots", -2, r"processors\.slots.* must be -1 or below"),
        ("mask_indices", 3, r"processors\.mask_indices.* must be -1 or below num_masks.*, got"),
        ("mask_indices", -2, r"processors\.mask_indices.* must be -1 or below"),
        ("repetition_penalty", 0.0, r"processors\.repetition_penalty.* must be finite and above 0"),
        ("repetition_penalty", math.nan, r"repetition_penalty.* must be finite and above 0"),
        ("presence_penalty", INF, r"presence_penalty.* finite.*, got"),
        ("frequency_penalty", math.nan, r"frequency_penalty.* finite.*, got"),
        ("typical_p", 0.0, r"sample: sampling.typical_p.* must be within \(0, 1\], got"),
        ("typical_p", math.nan, r"sample: sampling.typical_p.* must be within \(0, 1\], got"),
    ],
)
def test_invalid_values_are_reported(
    device: str, on_cuda: bool, field: str, value: float, message: str
) -> None:
    """Slots that no request uses may hold any values."""
    logits, positions = torch.zeros(2, 40, device=device), torch.tensor([3, 5]).int()
    processors = random_processors(2, 2, 40, positions)
    params = {**row_params(2), "typical_p": torch.ones(2)}
    if field == "typical_p":
        params[field][1] = value
    else:
        of_row = field in ("slots", "mask_indices")
        getattr(processors, field)[1 if of_row else processors.slots[1]] = value
    out = torch.full((2,), 7, dtype=torch.int32, device=device)
    with expect_fault(on_cuda, message):
        run(logits, positions, params, processors, token_ids=out)
    assert int(out[1]) == (-1 if on_cuda else 7)
    if field in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        processors.slots[1] = -1
        run(logits, positions, params, processors, token_ids=out)


def test_bad_words_require_the_earlier_tokens(device: str, on_cuda: bool) -> None:
    positions = torch.tensor([3, 12]).int()
    processors = random_processors(2, 2, 40, positions)
    processors = processors._replace(token_ids=processors.token_ids[:, :11].contiguous())
    with expect_fault(on_cuda, r"processors\.token_ids must be as wide as .*, got (11 wide|fewer)"):
        run(torch.zeros(2, 40, device=device), positions, row_params(2), processors)


def test_purposes_without_a_token_are_refused(device: str) -> None:
    logits, positions = torch.zeros(2, 5, device=device), positions_from(0, 2).to(device)
    with pytest.raises(
        ValueError, match=r"sample: purpose must be 0 \(DRAFT\) or 3 \(TARGET\), got"
    ):
        sampling.sample(logits, positions, purpose=Purpose.ACCEPT)


@pytest.mark.parametrize("rules", [{"repetition", "frequency"}, {"bad_words", "min_tokens"}])
def test_drafts_past_the_vocabulary_count_as_unlisted_tokens(
    device: str, isa: str, rules: set[str]
) -> None:
    """Rows behind such a draft are computed as if no table lists it."""
    batch, k, vocab, n = 4, 3, 70, 5
    drafts = torch.randint(vocab, (batch, k), dtype=torch.int32)
    drafts[1, 1], drafts[2, 0], drafts[3, 2] = vocab, 2**31 - 1, 1024
    positions = torch.tensor([5, 9, 3, 8], dtype=torch.int32)
    rows = batch * (k + 1)
    logits = torch.randn(rows, vocab)
    processors = only(
        random_processors(batch, rows, vocab, positions, drafts.clamp(max=vocab - 1)), rules
    )
    step = {
        "output_indptr": torch.arange(batch + 1, dtype=torch.int32) * (k + 1),
        "draft_token_ids": drafts,
        "positions": positions,
    }
    want_ids, want, _ = by_field(reference.top_logprobs)(
        logits, n, processed_logprobs=True, processors=processors, **step
    )
    ids, logprobs, _ = by_field(sampling.top_logprobs)(
        logits.to(device),
        n,
        processed_logprobs=True,
        processors=to_device(processors, device),
        **on_device(step, device),
    )
    assert torch.equal(ids.cpu(), want_ids)
    torch.testing.assert_close(logprobs.cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["slots", "mask_indices", "repetition_penalty", "token_ids"])
@pytest.mark.parametrize("op", ["verify", "verify of trees", "top_logprobs"])
def test_request_at_fault_does_not_affect_others(
    device: str, on_cuda: bool, op: str, change: str
) -> None:
    """The third of four requests is invalid. On CUDA, only this request gets no tokens."""
    batch, k, vocab, n = 4, 3, 70, 5
    step = {
        "output_indptr": torch.arange(batch + 1, dtype=torch.int32) * (k + 1),
        "draft_token_ids": torch.randint(vocab, (batch, k), dtype=torch.int32),
        "positions": torch.tensor([5, 9, 3, 8], dtype=torch.int32),
    }
    if op == "verify of trees":
        step["parents"] = torch.tensor([[-1, 0, 0]] * batch, dtype=torch.int32)
    rows = batch * (k + 1)
    processors = random_processors(batch, rows, vocab, step["positions"], step["draft_token_ids"])
    processors.slots.copy_(torch.tensor([1, 0, 3, 2]))
    processors.repetition_penalty[:] = 1.2
    logits = torch.randn(rows, vocab)

    def tokens(processors: LogitsProcessors) -> Tensor:
        arguments = on_device(step, device)
        more: dict[str, Any] = {"processors": to_device(processors, device)}
        if op == "top_logprobs":
            more["processed_logprobs"] = True
            more["ranks"] = torch.zeros(rows, n, dtype=torch.int32, device=device)
            out = by_field(sampling.top_logprobs)(logits.to(device), n, **arguments, **more)[0]
            return out.view(batch, -1).cpu()
        more["ranks"] = torch.zeros(batch, k + 1, dtype=torch.int32, device=device)
        out = by_field(sampling.verify)(logits.to(device), **arguments, **more)
        assert torch.equal(more["ranks"] > 0, out[0] >= 0)
        return out[0].cpu()

    want = tokens(processors)
    if change == "slots":
        processors.slots[2] = 6
    elif change == "mask_indices":
        processors.mask_indices[2 * (k + 1) + 2] = 3
    elif change == "repetition_penalty":
        processors.repetition_penalty[3] = -1.0
    else:
        processors.bad_words[:] = -1
        processors = processors._replace(token_ids=processors.token_ids[:, :8])
        step["positions"][1] = 8
        want = tokens(processors)
        step["positions"][2] = 9
    got = None
    with expect_fault(on_cuda, op.split()[0] + ": .* must be"):
        got = tokens(processors)
    if got is not None:
        assert (got[2] == -1).all()
        others = torch.tensor([0, 1, 3])
        assert torch.equal(got[others], want[others]) and (got[others, 0] >= 0).all()


# ---- overlay bits that do not fit into the memory of a block ----


def overlay_in_workspace(device: str, logits: Tensor, kib: int, batch: int = 0) -> None:
    """Check in the interpreter that blocks this small keep the bits of rows in the workspace."""
    if device != "simt":
        return

    def workspace_bytes() -> int:
        rows, vocab = logits.shape
        size = logits.element_size()
        return int(simt.load().sampling_workspace_bytes(rows, vocab, size, batch, 0))

    before = workspace_bytes()
    with simt.block_memory(kib):
        assert workspace_bytes() >= before + len(logits) * logits.shape[1] // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows,vocab,kib", [(13, 9001, 42), (2, 9001, 42), (1, 151_936, 44)])
@pytest.mark.fast("cpu-*", "simt-*-9001-*", "simt-1-*-dtype1")
def test_sample_with_the_overlay_in_the_workspace(
    request: pytest.FixtureRequest,
    device: str,
    isa: str,
    dtype: torch.dtype,
    rows: int,
    vocab: int,
    kib: int,
) -> None:
    """Results equal those with the bits in block memory, for one block per row and for several."""
    logits = (3 * torch.randn(rows, vocab)).to(dtype).to(device)
    positions = torch.randint(0, 20, (rows,), dtype=torch.int32)
    processors = random_processors(rows, rows, vocab, positions)
    params = with_typical(mixed_params(rows))
    want = run(logits, positions, params, processors, processed_logprobs=True)
    overlay_in_workspace(request.node.callspec.params["device"], logits, kib)
    with simt.block_memory(kib):
        check_as_if_edited(logits, positions, params, processors)
        got = run(logits, positions, params, processors, processed_logprobs=True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_top_logprobs_with_the_overlay_in_the_workspace(
    request: pytest.FixtureRequest, device: str, isa: str
) -> None:
    batch, k, vocab, n = 3, 2, 9001, 20
    step = chains_of(batch, k, vocab)
    rows = int(step["output_indptr"][-1]) + 1
    logits = (3 * torch.randn(rows, vocab)).to(device)
    positions = torch.randint(0, 20, (batch,), dtype=torch.int32)
    processors = random_processors(batch, rows, vocab, positions, step["draft_token_ids"])
    params = with_typical(mixed_params(batch))
    del params["seeds"], params["choice_index"]

    def scored() -> list[Tensor]:
        return by_field(sampling.top_logprobs)(
            logits,
            n,
            processed_logprobs=True,
            **on_device({**step, "positions": positions, **params}, device),
            processors=to_device(processors, device),
        )

    want = scored()
    edited = by_field(reference.process_logits)(logits.cpu(), processors, positions, **step)
    assert torch.equal(want[0].cpu()[:, 0].long(), edited.argmax(-1))
    overlay_in_workspace(request.node.callspec.params["device"], logits, 42)
    with simt.block_memory(42):
        got = scored()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.fast("cpu*", ci=("simt",))
def test_processors_support_rows_of_any_width(device: str, isa: str) -> None:
    """The vocabulary is so large that its token bits do not fit the shared memory of a block."""
    vocab = 448 * 1024 + 1
    logits = torch.randn(1, vocab).bfloat16().to(device)
    positions = torch.full((1,), 9, dtype=torch.int32)
    processors = random_processors(1, 1, vocab, positions)
    processors.mask_indices[:] = 2
    processors.slots[:] = 1
    check_as_if_edited(logits, positions, row_params(1, top_p=0.7), processors)
