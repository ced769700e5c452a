# SPDX-License-Identifier: Apache-2.0
"""`verify` against its reference for chains and trees; its rows equal `sample` rows bit for bit."""

import math
from typing import Any

import pytest
import simt
import specops
import torch
from processor_cases import RULES, only, random_processors, to_device
from sampling_cases import by_field, mixed_params, on_device, row_params
from shared_fixtures import expect_fault
from specops import reference, sampling
from specops.sampling import AcceptPolicy, Purpose, VerifyStrategy
from torch import Tensor

pytestmark = pytest.mark.no_bf16

GREEDY, TARGET_MATCH, REJECTION, BLOCK, TOPP = VerifyStrategy
NORMAL, ACCEPT_ALL, REJECT_ALL, SYNTHETIC = AcceptPolicy

FILTERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seeds", "choice_index")


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pick(values: list[Any], count: int) -> Tensor:
    return ints(*(values[int(i)] for i in torch.randint(len(values), (count,))))


def filters_of(step: dict[str, Tensor], b: int) -> dict[str, Tensor]:
    """Return the parameters with which `sample` chooses the tokens of request b."""
    own = {name: step[name][b : b + 1] for name in FILTERS if name in step}
    if "strategy" in step and step["strategy"][b] == GREEDY:
        own["temperature"] = own["temperature"] * 0
    return own


def random_parents(nodes: int) -> Tensor:
    """Return random parents: some branch at the root, some far from it, some are chains."""
    reach = int(torch.randint(1, nodes + 2, ()))
    return ints(*(max(-1, j - int(torch.randint(1, reach + 1, ()))) for j in range(nodes)))


def ragged_step(
    batch: int,
    k: int,
    vocab: int,
    *,
    strategies: list[Any] | None = None,
    policies: list[Any] | None = None,
    given: str = "none",
    tree: bool = False,
) -> dict[str, Tensor]:
    """Make requests with 0 (idle) to k + 1 rows. Most drafts are right, so walks end anywhere.

    `given` says whether draft_probs are dense, sparse or absent. Values that the op must not read
    are poisoned.
    """
    num_rows = torch.randint(0, k + 2, (batch,))
    output_indptr = torch.zeros(batch + 1, dtype=torch.int32)
    output_indptr[1:] = num_rows.cumsum(0)
    step = {
        "logits": 2 * torch.randn(int(output_indptr[-1]) + 2, vocab),
        "output_indptr": output_indptr,
        "draft_token_ids": torch.full((batch, k), 10**9, dtype=torch.int32),
        "positions": torch.randint(0, 5000, (batch,), dtype=torch.int32),
        "strategy": pick(strategies or [GREEDY, TARGET_MATCH], batch),
        "policy": pick(policies or [NORMAL] * 9 + [ACCEPT_ALL, REJECT_ALL], batch),
        **mixed_params(batch),
    }
    if given != "none" or tree:
        step["typical_p"] = torch.tensor([1.0, 1.0, 0.3, 0.95])[torch.randint(4, (batch,))]
    step["logits"][int(output_indptr[-1]) :] = math.nan
    if tree:
        step["parents"] = torch.full((batch, k), 10**9, dtype=torch.int32)
    if SYNTHETIC in (policies or []):
        step["accept_rates"] = torch.full((batch, k), math.nan)
    size = min(12, vocab)
    if given != "none":
        width = vocab if given == "dense" else size
        step["draft_probs"] = torch.full((batch, k, width), math.nan)
        if given == "sparse":
            step["draft_prob_token_ids"] = torch.full((batch, k, width), 10**9, dtype=torch.int32)
    for b in range(batch):
        nodes = int(num_rows[b]) - 1
        if nodes < 1:
            continue
        parents = random_parents(nodes) if tree else torch.arange(-1, nodes - 1)
        if tree:
            step["parents"][b, :nodes] = parents
        if "accept_rates" in step:
            step["accept_rates"][b, :nodes] = torch.rand(nodes).round(decimals=1)
        first = int(output_indptr[b])
        like = (step["logits"][first : first + nodes] + 1.5 * torch.randn(nodes, vocab)).softmax(-1)
        if given == "dense":
            step["draft_probs"][b, :nodes] = like
        if given == "sparse":
            probs, ids = like.topk(size)
            like = torch.zeros(nodes, vocab).scatter(1, ids, probs / probs.sum(-1, keepdim=True))
            step["draft_probs"][b, :nodes] = like.gather(1, ids)
            step["draft_prob_token_ids"][b, :nodes] = ids
            step["draft_prob_token_ids"][b, :nodes, -1] = -1
        for node in range(nodes):
            row = int(parents[node]) + 1
            kind = float(torch.rand(()))
            if kind < 0.6 if given == "none" else kind < 0.1:
                depth = len(reference.distribution._path(row, parents.tolist())) if tree else row
                token = by_field(reference.sample)(
                    step["logits"][first + row][None],
                    step["positions"][b : b + 1] + depth,
                    **filters_of(step, b),
                )[0]
            elif kind < 0.9:
                token = torch.multinomial(like[row], 1)[0]
            else:
                token = torch.randint(-1, vocab, ())
            step["draft_token_ids"][b, node] = token
    return step


def run_verify(step: dict[str, Any], device: str, **more: Any) -> dict[str, Tensor]:
    """Call `verify` with every output poisoned before."""
    batch, k = step["draft_token_ids"].shape
    out = {
        "output_token_ids": torch.full((batch, k + 1), 7, dtype=torch.int32, device=device),
        "num_accepted_tokens": torch.full((batch,), 7, dtype=torch.int32, device=device),
        "logprobs": torch.full((batch, k + 1), 7.0, device=device),
        "ranks": torch.full((batch, k + 1), 7, dtype=torch.int32, device=device),
        "accepted_nodes": torch.full((batch, k), 7, dtype=torch.int32, device=device),
    }
    if "processors" in more:
        more["processors"] = to_device(more["processors"], device)
    tokens, accepted = by_field(sampling.verify)(**on_device(step, device), **out, **more)
    assert tokens is out["output_token_ids"] and accepted is out["num_accepted_tokens"]
    return {name: tensor.cpu() for name, tensor in out.items()}


def check_step(step: dict[str, Any], device: str, **more: Any) -> dict[str, Tensor]:
    """Run a step on a device and compare everything with the reference."""
    got = run_verify(step, device, **more)
    want: dict[str, Any] = {
        "logprobs": torch.zeros(got["logprobs"].shape, dtype=torch.float64),
        "ranks": torch.zeros_like(got["output_token_ids"]),
        "accepted_nodes": torch.zeros_like(got["accepted_nodes"]),
    }
    emitted = by_field(reference.verify)(**step, **want, **more)
    for name, tensor in zip(("output_token_ids", "num_accepted_tokens"), emitted, strict=True):
        assert torch.equal(got[name], tensor), name
    assert torch.equal(got["accepted_nodes"], want["accepted_nodes"])
    assert torch.equal(got["ranks"], want["ranks"])
    torch.testing.assert_close(got["logprobs"].double(), want["logprobs"], rtol=1e-5, atol=1e-5)
    return got


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return all(torch.equal(got[name], want[name]) for name in got)


# ---- against the references ----


@pytest.mark.parametrize("batch,k,vocab", [(0, 3, 50), (5, 0, 50), (300, 4, 50), (12, 6, 3000)])
def test_verify_equals_the_reference(device: str, isa: str, batch: int, k: int, vocab: int) -> None:
    step = ragged_step(batch, k, vocab)
    got = check_step(step, device)
    if batch == 300:
        assert set(got["num_accepted_tokens"].tolist()) == set(range(k + 1))
        idle = step["output_indptr"].diff() == 0
        assert idle.any() and (got["output_token_ids"][idle] == -1).all()
        assert (got["num_accepted_tokens"][idle] == 0).all()


@pytest.mark.parametrize("given", ["none", "dense", "sparse"])
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("batch,k,vocab", [(120, 4, 50), (10, 15, 2100)])
@pytest.mark.pairwise
def test_verify_runs_all_strategies_in_one_batch(
    device: str, isa: str, batch: int, k: int, vocab: int, given: str, processed: bool
) -> None:
    step = ragged_step(batch, k, vocab, given=given, strategies=[*VerifyStrategy], policies=[0])
    got = check_step(step, device, processed_logprobs=processed)
    live = step["output_indptr"].diff() > 1
    for strategy in VerifyStrategy:
        if batch < 100:
            break
        chosen = live & (step["strategy"] == strategy)
        accepted = got["num_accepted_tokens"][chosen]
        assert accepted.any() and (accepted < step["output_indptr"].diff()[chosen] - 1).any()


@pytest.mark.parametrize("given", ["none", "dense"])
def test_verify_combines_policies_with_every_strategy(device: str, isa: str, given: str) -> None:
    step = ragged_step(
        100, 3, 40, given=given, strategies=[*VerifyStrategy], policies=[*AcceptPolicy]
    )
    check_step(step, device)


@pytest.mark.parametrize("given", ["none", "dense", "sparse"])
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("batch,n,vocab", [(60, 9, 20), (8, 20, 2100), (2, 64, 9)])
@pytest.mark.pairwise
def test_verify_of_trees_equals_the_reference(
    device: str, isa: str, batch: int, n: int, vocab: int, given: str, processed: bool
) -> None:
    strategies = [GREEDY, TARGET_MATCH, REJECTION, REJECTION]
    step = ragged_step(
        batch,
        n,
        vocab,
        given=given,
        strategies=strategies,
        policies=[NORMAL] * 9 + [REJECT_ALL],
        tree=True,
    )
    del step["policy" if batch == 8 else "choice_index"]
    got = check_step(step, device, processed_logprobs=processed)
    if batch == 60:
        nodes = got["accepted_nodes"]
        beyond = torch.arange(n)
        assert (nodes >= 0).any() and (nodes > beyond).any()  # paths that leave the first branch


@pytest.mark.parametrize("given", ["none", "dense", "sparse"])
@pytest.mark.parametrize("vocab", [8193, pytest.param(151_936, marks=pytest.mark.slow)])
def test_verify_of_large_vocabularies_equals_the_reference(
    device: str, isa: str, vocab: int, given: str
) -> None:
    """Cover every way in which filters reduce a row. Some rows have nothing in their last leaf."""
    batch, k = 7, 2
    step = ragged_step(batch, k, vocab, given=given, strategies=[REJECTION], policies=[NORMAL])
    rows = batch * (k + 1)
    step["output_indptr"] = torch.arange(0, rows + 1, k + 1, dtype=torch.int32)
    step["logits"] = torch.randn(rows, vocab)
    step["logits"][::2, vocab - vocab % 1024 :] = -math.inf
    best = step["logits"].argmax(-1).view(batch, k + 1)[:, :k]
    is_best = torch.rand(batch, k) < 0.5
    step["draft_token_ids"] = torch.where(is_best, best, torch.randint(vocab, (batch, k))).int()
    if given != "none":
        width = step["draft_probs"].shape[2]
        step["draft_probs"] = (2 * torch.randn(batch, k, width)).softmax(-1)
    if given == "sparse":
        ids = torch.stack([torch.randperm(vocab)[:width] for _ in range(batch * k)])
        ids[:, 0] = step["draft_token_ids"].flatten()
        step["draft_prob_token_ids"] = ids.view(batch, k, width).int()
    params = row_params(
        batch,
        temperature=[1.0, 0.2, 1.0, 0.5, 1.5, 1.0, 0.7],
        top_k=[0, 0, 50, 0, 3000, 0, 20],
        top_p=[1.0, 1.0, 1.0, 0.9, 0.95, 1.0, 0.8],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.0],
    )
    params["typical_p"] = torch.tensor([1, 0.9, 1, 1, 1, 0.5, 1])
    step |= params
    for strategy in (REJECTION, BLOCK):
        step["strategy"] = torch.full((batch,), strategy, dtype=torch.int32)
        got = check_step(step, device, processed_logprobs=True)
        assert (got["logprobs"] > -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_reads_strided_logits(device: str, isa: str, dtype: torch.dtype) -> None:
    step = ragged_step(20, 3, 77, given="dense", strategies=[*VerifyStrategy])
    wide = torch.full((len(step["logits"]), 99), math.nan, dtype=dtype)
    wide[:, 11:88] = step["logits"].to(dtype)
    step["logits"] = wide[:, 11:88].contiguous()
    want = run_verify(step, device)
    wide = wide.to(device)
    got = run_verify({**step, "logits": wide[:, 11:88]}, device)
    assert same(got, want)
    check_step(step, device)


@pytest.mark.parametrize(
    "rules",
    [set(RULES), {"repetition", "frequency"}, {"mask"}, {"bad_words", "bias", "min_tokens"}],
)
@pytest.mark.parametrize("given", ["none", "sparse"])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.pairwise
def test_verify_with_processors_equals_edited_logits(
    device: str, isa: str, on_cuda: bool, rules: set[str], given: str, tree: bool
) -> None:
    """A row counts the drafts before it. Bits equal those of logits edited in place."""
    batch, vocab = (16, 40) if on_cuda else (30, 40)
    step = ragged_step(
        batch,
        6,
        vocab,
        given=given,
        strategies=[GREEDY, TARGET_MATCH, REJECTION] + [BLOCK, TOPP] * (not tree),
        policies=[NORMAL],
        tree=tree,
    )
    step["positions"] = torch.randint(0, 20, (batch,), dtype=torch.int32)
    drafts = step["draft_token_ids"].clamp(max=vocab - 1)
    processors = only(
        random_processors(batch, len(step["logits"]), vocab, step["positions"], drafts), rules
    )
    got = check_step(step, device, processors=processors, processed_logprobs=True)
    edited = reference.process_logits(
        step["logits"],
        processors,
        step["positions"],
        drafts=sampling.Drafts(
            output_indptr=step["output_indptr"],
            token_ids=step["draft_token_ids"],
            parents=step.get("parents"),
        ),
    )
    assert same(got, run_verify({**step, "logits": edited}, device, processed_logprobs=True))
    raw = check_step(step, device, processors=processors)
    assert torch.equal(raw["output_token_ids"], got["output_token_ids"])
    plain = run_verify(step, device)
    assert not torch.equal(plain["output_token_ids"], got["output_token_ids"])


@pytest.mark.parametrize("given", ["none", "sparse"])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.pairwise
def test_verify_keeps_its_bits_with_the_overlay_in_the_workspace(
    device: str, isa: str, given: str, tree: bool
) -> None:
    """The overlay may also be in the memory of a block. Some rows are read again."""
    batch, vocab = 5, 9001
    step = ragged_step(
        batch,
        3,
        vocab,
        given=given,
        strategies=[TARGET_MATCH, REJECTION] + [BLOCK] * (not tree),
        policies=[NORMAL],
        tree=tree,
    )
    step["positions"] = torch.randint(0, 20, (batch,), dtype=torch.int32)
    drafts = step["draft_token_ids"].clamp(max=vocab - 1)
    rows = len(step["logits"])
    processors = random_processors(batch, rows, vocab, step["positions"], drafts)
    want = check_step(step, device, processors=processors, processed_logprobs=True)
    with simt.block_memory(42):
        got = run_verify(step, device, processors=processors, processed_logprobs=True)
    assert same(got, want)


# ---- draft_prob_rows ----


def with_rows(
    batch: int, k: int, vocab: int, *, given: str, drawn: int, **more: Any
) -> dict[str, Any]:
    """Return a step whose requests refer to rows of a table, several to one row, or to none.

    The table has probabilities of `drawn` drafts per row. Unused rows and the rows of idle requests
    are poisoned. Logits and probabilities are coarse, so that ties occur.
    """
    step: dict[str, Any] = ragged_step(batch, k, vocab, given=given, policies=[NORMAL], **more)
    step["logits"] = step["logits"].mul(2).round() / 2
    used, spare = max(batch // 2, 1), 3
    width = step["draft_probs"].shape[2]
    table = torch.randn(used + spare, drawn, width).mul(2).round().softmax(-1)
    table[used:] = math.nan
    step["draft_probs"] = table
    if given == "sparse":
        ids = torch.rand(used + spare, drawn, vocab).argsort(dim=2)[..., :width]
        ids[..., -1] = -1
        ids[used:] = 10**9
        step["draft_prob_token_ids"] = ids.int()
    rows = torch.randint(used, (batch,), dtype=torch.int32)
    rows[torch.rand(batch) < 0.3] = -1
    rows[step["output_indptr"].diff() == 0] = 10**9
    step["draft_prob_rows"] = rows
    return step


@pytest.mark.parametrize("given", ["dense", "sparse"])
@pytest.mark.parametrize("batch,k,vocab", [(120, 4, 50), (9, 3, 2100), (0, 2, 9), (5, 0, 9)])
@pytest.mark.pairwise
def test_rows_of_draft_probs_equal_gathered_probs(
    device: str, isa: str, batch: int, k: int, vocab: int, given: str
) -> None:
    """Requests without a row get the bits of a step without draft_probs."""
    step = with_rows(batch, k, vocab, given=given, drawn=k, strategies=[*VerifyStrategy])
    got = check_step(step, device, processed_logprobs=True)
    rows = step.pop("draft_prob_rows")
    tables = {name: step.pop(name) for name in list(step) if name.startswith("draft_prob")}
    own = {name: table[rows.clamp(0, len(table) - 1)] for name, table in tables.items()}
    gathered = run_verify({**step, **own}, device, processed_logprobs=True)
    absent = run_verify(step, device, processed_logprobs=True)
    for name, tensor in got.items():
        assert torch.equal(tensor[rows >= 0], gathered[name][rows >= 0]), name
        assert torch.equal(tensor[rows < 0], absent[name][rows < 0]), name
    if batch > 100:
        accepted = got["num_accepted_tokens"]
        assert accepted[rows >= 0].any() and accepted[rows < 0].any()
        assert not same(gathered, absent)


@pytest.mark.parametrize("given", ["dense", "sparse"])
@pytest.mark.parametrize("drawn", [2, 5])
@pytest.mark.pairwise
def test_rows_of_draft_probs_work_for_trees(device: str, isa: str, given: str, drawn: int) -> None:
    """A row of the table has the probabilities of the children of each node."""
    strategies = [TARGET_MATCH, REJECTION, REJECTION]
    step = with_rows(60, 5, 20, given=given, drawn=drawn, strategies=strategies, tree=True)
    got = check_step(step, device, processed_logprobs=True)
    bare = {name: x for name, x in step.items() if not name.startswith("draft_prob")}
    assert not same(got, run_verify(bare, device, processed_logprobs=True))


@pytest.mark.parametrize("given", ["dense", "sparse"])
@pytest.mark.parametrize("drawn", [0, 1, 3])
@pytest.mark.pairwise
def test_rows_of_draft_probs_may_cover_the_first_drafts_only(
    device: str, isa: str, on_cuda: bool, given: str, drawn: int
) -> None:
    """Drafts after those that were sampled count as certain."""
    batch, k = (60, 4) if on_cuda else (120, 4)
    strategies = [TARGET_MATCH, REJECTION, BLOCK, BLOCK]
    step = with_rows(batch, k, 50, given=given, drawn=drawn, strategies=strategies)
    for threads in (1, 2, 3) if not on_cuda else (1,):
        specops.set_num_threads(threads)
        got = check_step(step, device, processed_logprobs=True)
    if drawn == 0:
        bare = {name: x for name, x in step.items() if not name.startswith("draft_prob")}
        assert same(got, run_verify(bare, device, processed_logprobs=True))
    # the same drafts with their distributions in a table of twice the size
    far = {**step, "draft_prob_rows": step["draft_prob_rows"] * 2}
    far["draft_prob_rows"][step["draft_prob_rows"] < 0] = -1
    far["draft_prob_rows"][step["output_indptr"].diff() == 0] = -7
    for name in ("draft_probs", "draft_prob_token_ids"):
        if name in step:
            far[name] = step[name].repeat_interleave(2, dim=0)
            far[name][1::2] = 10**9
    assert same(got, run_verify(far, device, processed_logprobs=True))


def test_all_rows_of_draft_probs_may_be_absent(device: str, isa: str) -> None:
    step = ragged_step(20, 3, 30, strategies=[*VerifyStrategy], policies=[NORMAL])
    none = {"draft_probs": torch.zeros(0, 3, 30), "draft_prob_rows": torch.full((20,), -1).int()}
    assert same(run_verify({**step, **none}, device), run_verify(step, device))


# ---- exactness ----


def test_verify_rows_equal_sample_rows(device: str, isa: str, on_cuda: bool) -> None:
    """The bits equal plain decoding of one row at a time."""
    batch = 16 if on_cuda else 40
    step = ragged_step(batch, 5, 5000)
    step["policy"].zero_()
    for threads in (1, 2, 3) if not on_cuda else (1,):
        specops.set_num_threads(threads)
        got = run_verify(step, device)
        accepted = got["num_accepted_tokens"]
        for b in range(batch):
            for i in range(int(accepted[b]) + 1 if step["output_indptr"].diff()[b] else 0):
                row = int(step["output_indptr"][b]) + i
                logprobs = torch.zeros(1, device=device)
                token = by_field(sampling.sample)(
                    step["logits"][row : row + 1].to(device),
                    (step["positions"][b : b + 1] + i).to(device),
                    logprobs=logprobs,
                    **on_device(filters_of(step, b), device),
                )
                assert int(token) == int(got["output_token_ids"][b, i])
                assert torch.equal(logprobs[0].cpu(), got["logprobs"][b, i])
    assert (accepted > 0).any() and (accepted < step["output_indptr"].diff() - 1).any()


def request(step: dict[str, Any], b: int) -> dict[str, Any]:
    """Return one request of a step as a step of its own, without its neighbors' columns."""
    begin, end = step["output_indptr"][b : b + 2].tolist()
    nodes = max(end - begin - 1, 0)
    alone = {name: t[b : b + 1] for name, t in step.items() if len(t) == len(step["positions"])}
    for name in ("draft_token_ids", "parents", "draft_probs", "draft_prob_token_ids"):
        if name in alone:
            alone[name] = alone[name][:, :nodes].contiguous()
    if "accept_rates" in alone:
        alone["accept_rates"] = alone["accept_rates"][:, :nodes].contiguous()
    return {**alone, "logits": step["logits"][begin:end], "output_indptr": ints(0, end - begin)}


@pytest.mark.parametrize("given", ["none", "dense", "sparse"])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.pairwise
def test_single_requests_have_the_bits_of_a_batch(
    device: str, isa: str, on_cuda: bool, tree: bool, given: str
) -> None:
    batch = 8 if on_cuda else 24
    strategies = [GREEDY, TARGET_MATCH, REJECTION] if tree else [*VerifyStrategy]
    step = ragged_step(batch, 6, 2500, given=given, strategies=strategies, policies=[0], tree=tree)
    step["logits"][3] = -math.inf
    for threads in (1, 2, 3) if not on_cuda else (1,):
        specops.set_num_threads(threads)
        together = run_verify(step, device, processed_logprobs=True)
        for b in range(batch):
            got = run_verify(request(step, b), device, processed_logprobs=True)
            for name, tensor in got.items():
                size = tensor.shape[1] if tensor.dim() == 2 else None
                kept = together[name][b : b + 1] if size is None else together[name][b, None, :size]
                assert torch.equal(tensor, kept), (name, threads)


@pytest.mark.parametrize("given", ["none", "dense", "sparse"])
def test_tree_without_branches_equals_a_chain(device: str, isa: str, given: str) -> None:
    k = 5
    step = ragged_step(
        40,
        k,
        60,
        given=given,
        strategies=[GREEDY, TARGET_MATCH, REJECTION],
        policies=[NORMAL, NORMAL, REJECT_ALL],
    )
    want = run_verify(step, device, processed_logprobs=True)
    parents = torch.arange(-1, k - 1, dtype=torch.int32).expand(40, k).contiguous()
    got = run_verify({**step, "parents": parents}, device, processed_logprobs=True)
    assert same(got, want)
    rows = torch.arange(k).expand(40, k)
    assert torch.equal(
        got["accepted_nodes"], torch.where(rows < want["num_accepted_tokens"][:, None], rows, -1)
    )


# ---- hand-made cases ----


@pytest.mark.parametrize(
    "drafts,best,emitted",
    [
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),  # all accepted, plus the bonus
        ([1, 2, 3], [1, 5, 3, 4], [1, 5, -1, -1]),  # the first wrong draft ends the walk
        ([1, 2], [1, 2, 7], [1, 2, 7, -1]),
        ([3], [2, 4], [2, -1, -1, -1]),
        ([], [6], [6, -1, -1, -1]),  # only the bonus
        ([-1, 2, 3], [1, 2, 3, 4], [1, -1, -1, -1]),  # -1 is not a draft
        ([1, -1, 3], [1, 0, 3, 4], [1, 0, -1, -1]),
        ([5, 5, 5], [5, 5, 0, 1], [5, 5, 0, -1]),
    ],
)
@pytest.mark.parametrize("strategy", [*VerifyStrategy])
def test_verify_of_chains_by_hand(
    device: str, drafts: list[int], best: list[int], emitted: list[int], strategy: int
) -> None:
    """At temperature 0 every strategy is greedy, whatever draft_probs are."""
    logits = torch.zeros(len(best), 9)
    logits[torch.arange(len(best)), best] = 1.0
    step = {
        "logits": logits,
        "output_indptr": ints(0, len(best)),
        "draft_token_ids": ints([*drafts, *[10**9] * (3 - len(drafts))]),
        "positions": ints(17),
        "strategy": ints(strategy),
    }
    lies = torch.tensor([math.nan, -1.0, math.inf, 0.0, 0.3, 1.0, 7.0, 1e-30, 0.5])
    for more in ({}, {"draft_probs": lies.expand(1, 3, 9).contiguous()}, row_params(1, seeds=3)):
        if "seeds" in more:
            more["temperature"] *= 0
        got = run_verify({**step, **more}, device)
        assert got["output_token_ids"].tolist() == [emitted]
        assert got["num_accepted_tokens"].tolist() == [sum(t >= 0 for t in emitted) - 1]


@pytest.mark.parametrize("strategy", [REJECTION, BLOCK])
def test_empty_list_of_draft_probs_means_zero(device: str, strategy: int) -> None:
    """An empty list differs from an absent one: the draft has probability 0."""
    step = {
        "logits": torch.tensor([[5.0, 0.0], [5.0, 0.0]]),
        "output_indptr": ints(0, 2),
        "draft_token_ids": ints([1]),
        "positions": ints(1),
        "strategy": ints(strategy),
        "temperature": torch.ones(1),
        "seeds": torch.tensor([7]),
        "draft_probs": torch.zeros(1, 1, 0),
        "draft_prob_token_ids": torch.zeros(1, 1, 0, dtype=torch.int32),
    }
    assert check_step(step, device)["output_token_ids"].tolist() == [[1, 0]]


TREE = """
    root ─┬─ 0: token 4 ─── 3: token 2
          ├─ 1: token 5 ─┬─ 4: token 2
          ├─ 2: token 5  └─ 5: token 3 ─── 7: token 8
          └─ 6: none ─── 8: token 1
"""
PARENTS = [-1, -1, -1, 0, 1, 1, -1, 5, 6]
TOKENS = [4, 5, 5, 2, 2, 3, -1, 8, 1]


@pytest.mark.parametrize(
    "choices,emitted,nodes",
    [
        ({0: 5, 2: 3, 6: 8, 8: 0}, [5, 3, 8, 0], [1, 5, 7]),  # the first of two equal siblings
        ({0: 4, 1: 2, 4: 6}, [4, 2, 6], [0, 3]),
        ({0: 4, 1: 3}, [4, 3], [0]),  # a child of another branch does not count
        ({0: 1}, [1], []),  # a token of the tree, but not a child of the root
        ({0: 5, 2: 2, 5: 2}, [5, 2, 2], [1, 4]),
    ],
)
@pytest.mark.parametrize("strategy", [GREEDY, TARGET_MATCH, REJECTION])
def test_verify_of_trees_by_hand(
    device: str, choices: dict[int, int], emitted: list[int], nodes: list[int], strategy: int
) -> None:
    n = len(TOKENS)
    logits = torch.zeros(n + 1, 9)
    logits[:, 7] = 1.0
    for row, token in choices.items():
        logits[row, token] = 2.0
    step = {
        "logits": logits,
        "output_indptr": ints(0, n + 1),
        "draft_token_ids": ints(TOKENS),
        "parents": ints(PARENTS),
        "positions": ints(0),
        "strategy": ints(strategy),
    }
    got = run_verify(step, device)
    assert got["output_token_ids"].tolist() == [emitted + [-1] * (n + 1 - len(emitted))]
    assert got["accepted_nodes"].tolist() == [nodes + [-1] * (n - len(nodes))]
    assert got["num_accepted_tokens"].tolist() == [len(nodes)]


def test_sibling_without_a_token_ends_its_siblings(device: str, isa: str) -> None:
    """A chain also accepts no draft after one without a token."""
    logits = torch.zeros(4, 5)
    logits[0, 3] = 9.0
    step = {
        "logits": logits,
        "output_indptr": ints(0, 4),
        "draft_token_ids": ints([2, -1, 3]),
        "parents": ints([-1, -1, -1]),
        "positions": ints(0),
    }
    for strategy in (GREEDY, TARGET_MATCH, REJECTION):
        got = run_verify({**step, "strategy": ints(strategy)}, device)
        assert got["output_token_ids"].tolist() == [[3, -1, -1, -1]]
        assert got["num_accepted_tokens"].tolist() == [0]


# Ids past the last token, in its leaf and far away.
PAST = [50, 51, 1023, 1024, 2**31 - 1]


@pytest.mark.parametrize("given", ["none", "dense", "sparse"])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.pairwise
def test_draft_past_the_vocabulary_is_rejected(
    device: str, isa: str, tree: bool, given: str
) -> None:
    """The bits equal those of a draft with probability 0. Other drafts are verified as usual."""
    vocab, impossible = 50, 7
    strategies = [GREEDY, TARGET_MATCH, REJECTION] + [BLOCK, TOPP] * (not tree)
    step = ragged_step(
        100, 5, vocab, given=given, strategies=strategies, policies=[NORMAL], tree=tree
    )
    step["logits"][:, impossible] = -math.inf
    drafts = step["draft_token_ids"]
    is_draft = torch.arange(5) < (step["output_indptr"].diff() - 1)[:, None]
    changed = is_draft & (drafts >= 0) & (torch.rand(drafts.shape) < 0.3)
    step["draft_token_ids"] = torch.where(changed, impossible, drafts)
    want = run_verify(step, device, processed_logprobs=True)
    past = pick(PAST, drafts.numel()).view(drafts.shape)
    step["draft_token_ids"] = torch.where(changed, past, drafts)
    got = check_step(step, device, processed_logprobs=True)
    assert same(got, want)
    assert got["num_accepted_tokens"][changed.any(1)].any(), "no draft before one was accepted"


@pytest.mark.parametrize("given", ["none", "dense"])
def test_no_policy_emits_a_draft_past_the_vocabulary(device: str, isa: str, given: str) -> None:
    step = ragged_step(
        80, 3, 50, given=given, strategies=[*VerifyStrategy], policies=[*AcceptPolicy]
    )
    is_draft = torch.arange(3) < (step["output_indptr"].diff() - 1)[:, None]
    changed = is_draft & (torch.rand(80, 3) < 0.3)
    past = pick(PAST, 240).view(80, 3)
    step["draft_token_ids"] = torch.where(changed, past, step["draft_token_ids"])
    got = check_step(step, device)
    assert got["output_token_ids"].max() < 50
    accepted = got["num_accepted_tokens"]
    assert accepted[(step["policy"] == ACCEPT_ALL) & changed.any(1)].any()


def test_verify_follows_each_policy(device: str, isa: str) -> None:
    """One request each: normal, accept all, reject all, and accept all with a missing draft."""
    k, vocab = 3, 20
    logits = torch.randn(16, vocab)
    best = logits.argmax(dim=-1).int().view(4, 4)
    wrong = (best[:, :3] + 1) % vocab
    drafts = torch.stack([best[0, :3], wrong[1], best[2, :3], wrong[3]])
    drafts[3, 1] = -1
    got = run_verify(
        {
            "logits": logits,
            "output_indptr": torch.arange(0, 17, 4, dtype=torch.int32),
            "draft_token_ids": drafts,
            "positions": torch.zeros(4, dtype=torch.int32),
            "strategy": torch.full((4,), GREEDY, dtype=torch.int32),
            "policy": ints(NORMAL, ACCEPT_ALL, REJECT_ALL, ACCEPT_ALL),
            **row_params(4),
        },
        device,
    )
    tokens, accepted = got["output_token_ids"], got["num_accepted_tokens"]
    assert accepted.tolist() == [k, k, 0, 1]
    assert torch.equal(tokens[0], best[0])
    assert torch.equal(tokens[1], torch.cat([wrong[1], best[1, 3:]]))
    assert tokens[2].tolist() == [int(best[2, 0]), -1, -1, -1]
    assert tokens[3].tolist() == [int(wrong[3, 0]), int(best[3, 1]), -1, -1]
    emitted = tokens >= 0
    scores = logits.log_softmax(-1).view(4, 4, vocab)
    expected = scores.gather(2, tokens.clamp(min=0).long().unsqueeze(2)).squeeze(2) * emitted
    torch.testing.assert_close(got["logprobs"], expected)


def test_synthetic_rates_decide_acceptance(device: str, isa: str) -> None:
    """Acceptance ignores token ids: a rejected draft ends the walk even if it equals own[row]."""
    best = torch.randint(0, 9, (4,))
    logits = torch.nn.functional.one_hot(best, 9).float()
    step = {
        "logits": logits,
        "output_indptr": ints(0, 4),
        "draft_token_ids": best[None, :3].int(),
        "positions": ints(5),
        "policy": ints(SYNTHETIC),
        "seeds": torch.zeros(1, dtype=torch.int64),
    }
    for rates, accepted in (([1, 1, 1], 3), ([1, 0, 1], 1), ([0, 1, 1], 0), ([1, 1, 0], 2)):
        got = run_verify({**step, "accept_rates": torch.tensor([rates]).float()}, device)
        emitted = [*best[: accepted + 1].tolist(), *[-1] * (3 - accepted)]
        assert got["output_token_ids"].tolist() == [emitted]
        assert got["num_accepted_tokens"].tolist() == [accepted]
        wrong = {**step, "draft_token_ids": (best[None, :3].int() + 1) % 9}
        got = run_verify({**wrong, "accept_rates": torch.tensor([rates]).float()}, device)
        assert got["num_accepted_tokens"].tolist() == [accepted]
        assert got["output_token_ids"][0, accepted] == best[accepted]


def test_synthetic_rates_are_met(device: str, isa: str, on_cuda: bool) -> None:
    batch = 300 if on_cuda else 3000
    rates = torch.tensor([0.9, 0.5, 0.2])
    step = {
        "logits": torch.zeros(4 * batch, 3),
        "output_indptr": torch.arange(0, 4 * batch + 1, 4, dtype=torch.int32),
        "draft_token_ids": torch.zeros(batch, 3, dtype=torch.int32),
        "positions": torch.zeros(batch, dtype=torch.int32),
        "policy": torch.full((batch,), SYNTHETIC, dtype=torch.int32),
        "accept_rates": rates.expand(batch, 3).contiguous(),
        **row_params(batch),
    }
    accepted = run_verify(step, device)["num_accepted_tokens"]
    for i, rate in enumerate(rates.tolist()):
        reached = int((accepted >= i).sum())
        got = int((accepted > i).sum()) / reached
        assert abs(got - rate) < 5 * math.sqrt(rate * (1 - rate) / reached)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("strategy", [REJECTION, BLOCK])
def test_draft_of_probability_zero_is_accepted_if_the_target_allows_it(
    device: str, isa: str, strategy: int, sparse: bool
) -> None:
    batch, vocab = 60, 12
    logits = torch.randn(2 * batch, vocab)
    drafts = torch.randint(0, vocab, (batch, 1), dtype=torch.int32)
    probs = torch.rand(batch, 1, vocab).scatter(2, drafts[:, :, None].long(), 0.0)
    step = {
        "logits": logits,
        "output_indptr": torch.arange(0, 2 * batch + 1, 2, dtype=torch.int32),
        "draft_token_ids": drafts,
        "positions": torch.zeros(batch, dtype=torch.int32),
        "strategy": torch.full((batch,), strategy, dtype=torch.int32),
        "draft_probs": probs / probs.sum(-1, keepdim=True),
        **row_params(batch, top_k=4),
    }
    if sparse:
        ids = torch.arange(vocab, dtype=torch.int32).expand(batch, 1, vocab)
        step["draft_prob_token_ids"] = torch.where(ids == drafts[:, :, None], -1, ids).contiguous()
    got = check_step(step, device)
    kept = logits[::2].gather(1, drafts.long())[:, 0] >= logits[::2].topk(4).values[:, 3]
    assert torch.equal(got["num_accepted_tokens"], kept.int())
    assert kept.any() and not kept.all()
    assert not torch.equal(got["output_token_ids"][~kept, :1], drafts[~kept])


@pytest.mark.parametrize("strategy", [REJECTION, BLOCK, TOPP])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 5, "temperature": 0.7}])
@pytest.mark.pairwise
def test_drafts_sampled_from_the_target_are_always_accepted(
    device: str, isa: str, strategy: int, filters: dict[str, float]
) -> None:
    batch, k, vocab = 40, 3, 1500
    logits = torch.randn(batch * (k + 1), vocab)
    params = row_params(batch, **filters)
    step = {
        "logits": logits,
        "output_indptr": torch.arange(0, len(logits) + 1, k + 1, dtype=torch.int32),
        "draft_token_ids": torch.zeros(batch, k, dtype=torch.int32),
        "positions": torch.randint(0, 99, (batch,), dtype=torch.int32),
        "strategy": torch.full((batch,), strategy, dtype=torch.int32),
        "draft_probs": torch.zeros(batch, k, vocab),
        **params,
    }
    anchors = step["positions"] + 1 if strategy == BLOCK else torch.zeros_like(step["positions"])
    for i in range(k):
        probs = torch.zeros(batch, vocab)
        step["draft_token_ids"][:, i] = by_field(reference.sample)(
            logits[i :: k + 1],
            step["positions"] + i,
            purpose=Purpose.DRAFT,
            anchors=anchors,
            probs=probs,
            **params,
        )
        step["draft_probs"][:, i] = probs
    got = check_step(step, device)
    assert (got["num_accepted_tokens"] == k).all()


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize("strategy", [*VerifyStrategy])
def test_rows_without_a_finite_logit_emit_token_0(device: str, value: float, strategy: int) -> None:
    """A draft of token 0 is accepted."""
    probs = torch.full((3, 2, 700), 1 / 700)
    step = {
        "logits": torch.full((9, 700), value),
        "output_indptr": ints(0, 3, 6, 9),
        "draft_token_ids": torch.tensor([[0, 0], [0, 5], [5, 0]], dtype=torch.int32),
        "positions": ints(1, 2, 3),
        "strategy": ints(strategy, strategy, strategy),
        **row_params(3),
    }
    for more in ({}, {"draft_probs": probs}):
        got = run_verify({**step, **more}, device)
        assert got["output_token_ids"].tolist() == [[0, 0, 0], [0, 0, -1], [0, -1, -1]]
        assert (got["logprobs"][got["output_token_ids"] >= 0] == -math.inf).all()


def test_block_strategy_ends_at_a_missing_draft(device: str, isa: str) -> None:
    """The chain equals a shorter one: it uses the same random numbers and emits the same token."""
    step = ragged_step(40, 4, 30, given="dense", strategies=[BLOCK], policies=[NORMAL])
    step["output_indptr"] = torch.arange(0, 201, 5, dtype=torch.int32)
    step["logits"] = torch.randn(200, 30)
    step["draft_probs"] = torch.randn(40, 4, 30).softmax(-1)
    step["draft_token_ids"] = torch.randint(0, 30, (40, 4), dtype=torch.int32)
    step["draft_token_ids"][:, 2] = -1
    got = check_step(step, device)
    short = {
        **step,
        "logits": step["logits"].view(40, 5, 30)[:, :3].reshape(120, 30),
        "output_indptr": torch.arange(0, 121, 3, dtype=torch.int32),
        "draft_token_ids": step["draft_token_ids"][:, :2].contiguous(),
        "draft_probs": step["draft_probs"][:, :2].contiguous(),
    }
    want = run_verify(short, device)
    assert torch.equal(got["output_token_ids"][:, :3], want["output_token_ids"])
    assert torch.equal(got["num_accepted_tokens"], want["num_accepted_tokens"])


@pytest.mark.parametrize("strategy", [*VerifyStrategy])
def test_verify_without_drafts_equals_sample(device: str, isa: str, strategy: int) -> None:
    rows = 50
    logits, positions = torch.randn(rows, 300).to(device), torch.arange(rows, dtype=torch.int32)
    params = mixed_params(rows)
    step = {
        "logits": logits,
        "output_indptr": torch.arange(rows + 1, dtype=torch.int32),
        "draft_token_ids": torch.zeros(rows, 0, dtype=torch.int32),
        "positions": positions,
        "strategy": torch.full((rows,), strategy, dtype=torch.int32),
        **params,
    }
    got = run_verify(step, device)["output_token_ids"][:, 0]
    if strategy == GREEDY:
        params["temperature"] *= 0
    want = by_field(sampling.sample)(logits, positions.to(device), **on_device(params, device))
    assert torch.equal(got, want.cpu())


def test_rejected_siblings_are_never_emitted(device: str, isa: str) -> None:
    """The token after rejected siblings is sampled from the rest."""
    batch, vocab, n = 200, 6, 4
    row = torch.randn(vocab)
    step = {
        "logits": row.expand(batch * (n + 1), vocab).contiguous(),
        "output_indptr": torch.arange(0, batch * (n + 1) + 1, n + 1, dtype=torch.int32),
        "draft_token_ids": ints([2, 2, 0, 5]).expand(batch, n).contiguous(),
        "parents": torch.full((batch, n), -1, dtype=torch.int32),
        "positions": torch.zeros(batch, dtype=torch.int32),
        "strategy": torch.full((batch,), REJECTION, dtype=torch.int32),
        **row_params(batch),
    }
    got = check_step(step, device)
    first, nodes = got["output_token_ids"][:, 0], got["accepted_nodes"][:, 0]
    assert set(first.tolist()) == set(range(vocab))
    for token, node in ((2, 0), (0, 2), (5, 3), (1, -1), (3, -1), (4, -1)):
        assert set(nodes[first == token].tolist()) == {node}


# ---- parameters ----


def test_verify_does_not_read_the_drafts_of_other_rows(device: str) -> None:
    """A request with two rows has one draft, whatever follows it."""
    logits = torch.zeros(2, 10)
    logits[:, 4] = 1.0
    got = run_verify(
        {
            "logits": logits,
            "output_indptr": torch.tensor([0, 2], dtype=torch.int32),
            "draft_token_ids": torch.tensor([[4, 4, 999]], dtype=torch.int32),
            "positions": torch.zeros(1, dtype=torch.int32),
            "strategy": torch.zeros(1, dtype=torch.int32),
            "policy": torch.zeros(1, dtype=torch.int32),
            **row_params(1),
        },
        device,
    )
    assert got["output_token_ids"].tolist() == [[4, 4, -1, -1]]
    assert got["num_accepted_tokens"].tolist() == [1]


@pytest.mark.parametrize("strategy", [VerifyStrategy.GREEDY, VerifyStrategy.REJECTION])
def test_verify_phase_stamps_change_no_bit(
    device: str, on_cuda: bool, strategy: VerifyStrategy
) -> None:
    """The stamps cover every phase of the blocks."""
    stamps = torch.zeros(1024, 6, dtype=torch.int64, device=device)
    if not on_cuda:
        with pytest.raises(ValueError, match="set_verify_stamps: stamps must be on cuda"):
            sampling.set_verify_stamps(stamps)
        return
    if simt.BUILD == "race":
        pytest.skip("the detector does not know the memory of the stamps")
    step = ragged_step(3, 2, 3000)
    step["logits"] = step["logits"].bfloat16()
    step["strategy"] = strategy
    plain = run_verify(step, device)
    sampling.set_verify_stamps(stamps)
    try:
        got = run_verify(step, device)
        with pytest.raises(ValueError, match="logits must be bfloat16, without processors, while"):
            run_verify({**step, "logits": step["logits"].float()}, device)
        sampling.set_verify_stamps(stamps[:1])
        with pytest.raises(ValueError, match=r"phase stamps must have a row for each of .* got 1"):
            run_verify(step, device)
    finally:
        sampling.set_verify_stamps(None)
    assert same(got, plain)
    rows = stamps[stamps[:, 0] != 0].cpu()
    begin, end, cycles = rows[:, 0], rows[:, 1], rows[:, 2:5]
    assert (end >= begin).all() and (cycles >= 0).all()
    scan, choose, walk = cycles.unbind(1)
    assert (scan > 0).any() and (choose > 0).any() and (walk > 0).all()


def test_verify_without_parameters_is_greedy(device: str, isa: str) -> None:
    step = ragged_step(20, 3, 90)
    bare = {
        name: step[name] for name in ("logits", "output_indptr", "draft_token_ids", "positions")
    }
    whole = torch.zeros(20, dtype=torch.int32)
    want = run_verify({**bare, "strategy": whole, "policy": whole, **row_params(20)}, device)
    assert same(run_verify(bare, device), want)
    assert (want["num_accepted_tokens"] > 0).any()
    del step["strategy"], step["policy"]
    defaults = {"strategy": whole + TARGET_MATCH, "policy": whole}
    assert same(run_verify(step, device), run_verify({**step, **defaults}, device))


def test_one_workspace_serves_calls_of_any_size(device: str, on_cuda: bool) -> None:
    """The workspace was made for the largest call."""
    steps = [ragged_step(batch, 3, 20_000) for batch in (2, 5, 1)]
    largest = on_device(steps[1], device)["logits"]
    workspace = sampling.sampling_workspace(largest, 5)
    assert (workspace is not None) == on_cuda
    for step in [*steps, *reversed(steps)]:
        got = by_field(sampling.verify)(**on_device(step, device), workspace=workspace)
        want = by_field(sampling.verify)(**on_device(step, device))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    if on_cuda:
        with pytest.raises(ValueError, match=r"verify: workspace must be at least \d+ bytes"):
            by_field(sampling.verify)(
                **on_device(steps[1], device),
                workspace=torch.zeros(16, dtype=torch.uint8, device=device),
            )


# ---- one number for all requests ----


@pytest.mark.parametrize("strategy", VerifyStrategy)
@pytest.mark.parametrize("policy", AcceptPolicy)
@pytest.mark.fast("cpu-*", "simt-0-[03]", "simt-[123]-2")
def test_one_number_applies_to_all_requests(
    device: str, isa: str, strategy: int, policy: int
) -> None:
    step = ragged_step(40, 3, 50, given="dense", strategies=[strategy], policies=[policy])
    numbers = {"temperature": 0.75, "top_k": 30, "top_p": 0.875, "min_p": 0.0625}
    numbers |= {"typical_p": 0.96875, "choice_index": 3}
    for name, number in numbers.items():
        step[name] = torch.full((40,), number, dtype=step[name].dtype)
    want = run_verify(step, device)
    each: dict[str, Any] = {"strategy": strategy, "policy": policy, **numbers}
    assert same(run_verify({**step, **each}, device), want)
    for name, number in each.items():
        assert same(run_verify({**step, name: number}, device), want), name


def test_seeds_are_optional_if_nothing_is_sampled(device: str, isa: str) -> None:
    """Requests at temperature 0 or under GREEDY need no seeds, whatever their other parameters."""
    step = ragged_step(40, 3, 50, strategies=[GREEDY], policies=[NORMAL, ACCEPT_ALL, REJECT_ALL])
    want = check_step(step, device)
    unseeded = {name: x for name, x in step.items() if name != "seeds"}
    assert same(run_verify(unseeded, device), want)
    cold = {**unseeded, "temperature": torch.zeros(40)}
    del cold["strategy"]
    assert same(run_verify(cold, device), want)
    bare = {name: x for name, x in cold.items() if name not in FILTERS}
    assert same(run_verify(bare, device), want)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"temperature": -1.0}, "sampling.temperature must be finite and at least 0, got -1"),
        ({"temperature": math.inf}, "sampling.temperature must be finite and at least 0, got inf"),
        (
            {"temperature": "hot"},
            r"sampling.temperature must be a number or float32 \[batch=1\], got 'hot'",
        ),
        (
            {"temperature": True},
            r"sampling.temperature must be a number or float32 \[batch=1\], got True",
        ),
        ({"top_k": 2.0}, r"sampling.top_k must be an int or int32 \[batch=1\], got 2\.0"),
        ({"top_k": -2}, "sampling.top_k must be at least 1, or 0 or -1 for off, got -2"),
        ({"top_k": 2**31}, "sampling.top_k must be an int32, got 2147483648"),
        ({"top_p": 2}, r"sampling.top_p must be within \[0, 1\], got 2"),
        ({"min_p": math.nan}, r"sampling.min_p must be within \[0, 1\], got nan"),
        ({"typical_p": 0.0}, r"sampling.typical_p must be within \(0, 1\], got 0"),
        ({"strategy": 5}, r"strategy must be 0 \(GREEDY\), 1 .*, got 5"),
        ({"policy": -1}, r"policy must be 0 \(NORMAL\), 1 .*, got -1"),
        (
            {"strategy": BLOCK, "parents": [[0]]},
            r"strategy must be .* where parents are given, got 3",
        ),
        (
            {"choice_index": 0.5},
            r"sampling.choice_index must be an int or int32 \[batch=1\], got 0\.5",
        ),
        (
            {"temperature": None, "top_p": 0.5},
            "sampling.top_p must be None without temperature .*, got a value",
        ),
    ],
)
def test_invalid_numbers_are_refused_at_once(
    device: str, change: dict[str, Any], message: str
) -> None:
    """This holds on CUDA, too: the host knows the numbers."""
    step: dict[str, Any] = {
        "logits": torch.zeros(2, 5),
        "output_indptr": ints(0, 2),
        "draft_token_ids": ints([0]),
        "positions": ints(0),
        "seeds": torch.tensor([1]),
        "temperature": 1.0,
    }
    step |= {name: ints(*x) if isinstance(x, list) else x for name, x in change.items()}
    with pytest.raises(ValueError, match=f"^verify: {message}"):
        by_field(sampling.verify)(**on_device(step, device))


# ---- errors ----


@pytest.mark.parametrize(
    "change,message",
    [
        ({"output_indptr": [0, 4]}, r"output_indptr.* must be ascending.* by at most k \+ 1"),
        ({"output_indptr": [0, -1]}, r"output_indptr.* must be ascending"),
        ({"output_indptr": [1, 2]}, r"output_indptr.* must be .*0"),
        ({"strategy": [5]}, r"strategy.* must be 0 \(GREEDY\), 1 \(TARGET_MATCH\), 2 .*, got"),
        ({"policy": [-1]}, r"policy.* must be 0 \(NORMAL\)"),
        ({"top_p": [7.0]}, r"verify: sampling.top_p.* must be within"),
        ({"typical_p": [0.0]}, r"verify: sampling.typical_p.* must be within"),
        ({"policy": [3]}, r"verify: accept_rates must be given where a policy is 3"),
        (
            {"policy": [3], "accept_rates": [[0.5, 0.5]], "seeds": None},
            r"verify: sampling.seeds must be given where a temperature is above 0 or a policy is 3",
        ),
        (
            {"strategy": [2], "seeds": None},
            r"verify: sampling.seeds must be given where a temperature is",
        ),
        ({"policy": [3], "accept_rates": [[0.5, 1.5]]}, r"accept_rates.* must be within \[0, 1\]"),
        ({"policy": [3], "accept_rates": [[math.nan, 1]]}, r"accept_rates.* must be within"),
        (
            {"draft_probs": [[[0.5]] * 2], "draft_prob_token_ids": [[[4], [5]]], "strategy": [2]},
            r"verify: draft_probs.token_ids.* must be -1 or below",
        ),
        (
            {"draft_probs": [[[0.5]] * 2], "draft_prob_token_ids": [[[4], [-2]]], "strategy": [3]},
            r"verify: draft_probs.token_ids.* must be -1 or below",
        ),
        (
            {"draft_probs": [[[0.2] * 5] * 2], "draft_prob_rows": [1], "strategy": [2]},
            r"verify: draft_probs.rows.* must be -1 or .*row.*, got",
        ),
        (
            {"draft_probs": [[[0.2] * 5]], "draft_prob_rows": [-2]},
            r"verify: draft_probs.rows.* must be -1 or .*row.*, got",
        ),
        ({"parents": [[0, 0]]}, r"verify: drafts.parents.* must be at least -1 and below the node"),
        ({"parents": [[-2, 0]]}, r"verify: drafts.parents.* must be at least -1"),
        (
            {"parents": [[-1, -1]], "strategy": [3]},
            r"strategy.* must be 0.* or 2 \(REJECTION\) where parents are given, got",
        ),
        (
            {"parents": [[-1, -1]], "policy": [1]},
            r"policy.* must be 0 \(NORMAL\) or 2 .* where parents",
        ),
    ],
)
def test_verify_refuses_values(
    device: str, on_cuda: bool, change: dict[str, Any], message: str
) -> None:
    """On CUDA the invalid request emits nothing, and its neighbors are unaffected."""
    step: dict[str, Any] = {
        "output_indptr": [0, 3],
        "draft_token_ids": [[0, 0]],
        "positions": [0],
        "strategy": [0],
        "policy": [0],
    }
    filters = {name: value for name, value in change.items() if name in FILTERS and value}
    arrays: dict[str, Any] = {"logits": torch.zeros(3, 5), **row_params(1, **filters)}
    arrays = {name: value for name, value in arrays.items() if change.get(name, 0) is not None}
    for name, value in {**step, **change}.items():
        if name not in FILTERS:
            floating = name in ("accept_rates", "draft_probs")
            dtype = torch.float32 if floating else torch.int32
            arrays[name] = torch.tensor(value, dtype=dtype)
    arrays = on_device(arrays, device)
    tokens = torch.full((1, 3), 7, dtype=torch.int32, device=device)
    accepted = torch.full((1,), 7, dtype=torch.int32, device=device)
    with expect_fault(on_cuda, message):
        by_field(sampling.verify)(**arrays, output_token_ids=tokens, num_accepted_tokens=accepted)
    assert tokens.tolist() == ([[-1, -1, -1]] if on_cuda else [[7, 7, 7]])
    assert accepted.tolist() == ([0] if on_cuda else [7])


def test_verify_refuses_too_large_trees(device: str) -> None:
    nodes = torch.zeros(1, 3073, dtype=torch.int32, device=device)
    with pytest.raises(
        ValueError, match=r"drafts\.token_ids must be of at most 3072 drafts a request"
    ):
        sampling.verify(
            torch.zeros(1, 5, device=device),
            sampling.Drafts(ints(0, 1).to(device), nodes, parents=nodes),
            positions=ints(0).to(device),
        )


def test_verify_refuses_rows_without_probabilities(device: str) -> None:
    step = ragged_step(2, 3, 9)
    step["draft_prob_rows"] = ints(0, 1)
    with pytest.raises(ValueError, match=r"draft_probs\.probs must be float32 .*, got None"):
        by_field(sampling.verify)(**on_device(step, device))


@pytest.mark.parametrize("sparse", [False, True])
def test_verify_refuses_draft_probs_of_another_size(device: str, sparse: bool) -> None:
    """Only with draft_prob_rows may shapes differ from [batch, k, ...], with at most k drafts."""
    step = ragged_step(2, 3, 9)
    for shape, rows, message in (
        ((3, 3, 9), None, r"draft_probs.probs must be float32 \[batch=2, k=3, "),
        ((2, 2, 9), None, r"draft_probs.probs must be float32 \[batch=2, k=3, "),
        ((2, 4, 9), ints(0, 1), "draft_probs.probs must be of at most k = 3 drafts a row, got 4"),
        ((3, 2, 9), ints(0, 1, 2), r"draft_probs.rows must be int32 \[batch=2\]"),
    ):
        wrong = {**step, "draft_probs": torch.zeros(shape)}
        if sparse:
            wrong["draft_prob_token_ids"] = torch.zeros(shape, dtype=torch.int32)
        if rows is not None:
            wrong["draft_prob_rows"] = rows
        with pytest.raises(ValueError, match=message):
            by_field(sampling.verify)(**on_device(wrong, device))
    wrong = {**step, "draft_probs": torch.zeros(5, 2, 9), "draft_prob_rows": ints(4, -1)}
    wrong["draft_prob_token_ids"] = torch.zeros(5, 1, 9, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"draft_probs\.token_ids must be int32"):
        by_field(sampling.verify)(**on_device(wrong, device))


def test_verify_refuses_token_ids_without_probabilities(device: str) -> None:
    step = ragged_step(2, 3, 9, given="sparse")
    del step["draft_probs"]
    with pytest.raises(ValueError, match=r"draft_probs\.probs must be float32 .*, got None"):
        by_field(sampling.verify)(**on_device(step, device))
