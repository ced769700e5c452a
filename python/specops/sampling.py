# SPDX-License-Identifier: Apache-2.0
"""Sampling ops: one sampled token per row, verification of drafts, and the most probable tokens.

Every choice is a function of its own row, its request's parameters, and the absolute position of
the token being chosen. `verify` and `sample` share one row function, so speculation changes no bit.
"""

from enum import IntEnum
from typing import Any, NoReturn

import torch
from torch import Tensor

from specops import _C
from specops._checks import check_int, describe, empty, try_or_none
from specops.argument_groups import (
    DraftProbs as DraftProbs,
)
from specops.argument_groups import (
    Drafts as Drafts,
)
from specops.argument_groups import (
    EmittedTokens as EmittedTokens,
)
from specops.argument_groups import (
    EndingRules as EndingRules,
)
from specops.argument_groups import (
    LogitsProcessors as LogitsProcessors,
)
from specops.argument_groups import (
    RequestStatus as RequestStatus,
)
from specops.argument_groups import (
    SampleOutputs as SampleOutputs,
)
from specops.argument_groups import (
    SamplingTensors as SamplingTensors,
)
from specops.argument_groups import (
    TokenCounts as TokenCounts,
)
from specops.argument_groups import (
    TopLogprobsOutputs as TopLogprobsOutputs,
)
from specops.argument_groups import (
    VerifyOutputs as VerifyOutputs,
)


class VerifyStrategy(IntEnum):
    """Rule by which `verify` accepts drafts; values of its `strategy` argument."""

    GREEDY = 0
    """Emit the row's argmax, whatever the filters: the tokens of greedy decoding."""
    TARGET_MATCH = 1
    """Emit the token `sample` chooses for the row, as seeded sampling without speculation does."""
    REJECTION = 2
    """Accept a draft with probability min(1, target / draft), else sample the residual: the output
    has the target's distribution."""
    BLOCK = 3
    """Decide about a request's drafts jointly: the output has the target's distribution, with at
    least as many tokens on average as REJECTION. Chains only."""
    TOPP = 4
    """FastDeploy's rule: accept any draft that the filters keep. BIASED to the drafter. Chains
    only."""


class AcceptPolicy(IntEnum):
    """Override of the strategy for a request's drafts; values of `verify`'s `policy` argument."""

    NORMAL = 0
    """Accept drafts as the strategy decides."""
    ACCEPT_ALL = 1
    """Emit every draft, then the bonus token. For measurements: the text is not the target's."""
    REJECT_ALL = 2
    """Emit the first row's token only: the text is the target's, and speculation gains nothing."""
    SYNTHETIC = 3
    """Accept drafts at given rates. For measurements: the text is not the target's."""


class Purpose(IntEnum):
    """Use of a random number; the streams of two purposes never overlap."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    TARGET = 3


class FinishReason(IntEnum):
    """Reason why `commit` ended a request; values of its `finish_reasons` argument."""

    RUNNING = 0
    """The request has not ended."""
    STOP_TOKEN = 1
    """A stop token id was emitted; it is the last token of the output."""
    STOP_SEQUENCE = 2
    """A stop sequence was completed; its tokens are the last of the output."""
    LENGTH = 3
    """The request reached its maximum length, or its reply reached the reply budget."""


def sample(
    logits: Tensor,
    positions: Tensor,
    *,
    sampling: SamplingTensors | None = None,
    processors: LogitsProcessors | None = None,
    purpose: Purpose = Purpose.TARGET,
    anchors: Tensor | None = None,
    processed_logprobs: bool = False,
    outputs: SampleOutputs | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Choose one token per row.

    Same as `reference.sample`. After `processors`, and with tokens ordered by (logit descending, id
    ascending):

        weight = exp((logit - max) / temperature)            temperature 0: the first token, done
        keep the first top_k tokens
        keep the smallest prefix whose weight is at least top_p of the kept weight
        keep weights of at least min_p
        keep the smallest prefix by (|-log(weight / kept weight) - entropy|, id) whose weight is at
            least typical_p of the kept weight
        token = the first kept id, ascending, at which the running weight exceeds u * kept weight

    u is the first word of Philox4x32-10 under the row's seed at the counter
    (position, purpose, choice_index, anchor), its upper 24 bits times 2^-24.

    Args:
        logits: [rows, vocab_size], float32 or bfloat16; rows may be strided. NaN counts as -inf,
            +inf as the largest finite float.
        positions: [rows], int32. Absolute position of the token being chosen.
        sampling: temperature, filters and random numbers; absent: every row is greedy.
        processors: changes of the logits before the filters, one request per row; absent: none.
        purpose: TARGET, or DRAFT for the tokens of a drafter.
        anchors: [rows], int32. Last part of the key of the random numbers. BLOCK verification uses
            position + 1 of the step's first token; absent: 0.
        processed_logprobs: whether logprobs and ranks come from the distribution that is sampled
            (at temperature 0: from the processed logits) instead of the untouched logits.
        outputs: tensors to write; absent: the tokens alone.
        workspace: [bytes], uint8, from `sampling_workspace`. Allocated when absent and needed: only
            on CUDA, and only if many blocks share few rows.

    Returns:
        The tokens, [rows], int32. A row in which every logit is -inf or NaN yields token 0 with
        logprob -inf.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or a parameter is out
            of its range; nothing has been written. On CUDA a parameter out of range yields token -1
            for that row, and `check_errors` raises.

    Note:
        Deterministic. A row's token depends on that row's arguments alone. Sums run over leaves at
        fixed ids, each in fp32 in a fixed order; their fold is exact (cuda) or left to right (cpu).

    Source: inverse transform sampling; Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p),
        Salmon et al. 2011 (Philox).
    """
    # If `outputs` has another type, the op reports it.
    tokens: Any = getattr(outputs, "token_ids", outputs)
    if tokens is None:
        tokens = empty(lambda: (logits.shape[:1], torch.int32, logits))
        outputs = SampleOutputs(tokens, *(outputs or ())[1:])
    if workspace is None:
        workspace = _workspace(logits)
    assert outputs is not None
    _C.sample(
        logits,
        positions,
        sampling,
        processors,
        purpose,
        anchors,
        processed_logprobs,
        outputs,
        workspace,
    )
    return tokens  # type: ignore[no-any-return]


def verify(
    logits: Tensor,
    drafts: Drafts,
    positions: Tensor,
    *,
    strategy: Tensor | VerifyStrategy | None = None,
    policy: Tensor | AcceptPolicy | None = None,
    accept_rates: Tensor | None = None,
    sampling: SamplingTensors | None = None,
    processors: LogitsProcessors | None = None,
    draft_probs: DraftProbs | None = None,
    processed_logprobs: bool = False,
    outputs: VerifyOutputs | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Emit the path of drafts that agrees with the target, and one more token.

    Same as `reference.verify`. An idle request emits nothing. For any other, with depth(row) the
    number of drafts from the root down to the row:

        choice[row] = the strategy's token of the row, at position positions[b] + depth(row)
        row = root
        while row has a child with the token choice[row]: emit it, row = the first such child
        emit choice[row]

    Let own[row] be the token that `sample` chooses for the row, target[row] the distribution it
    samples (processors and filters applied), draft_probs[row] the distribution that the row's
    children were sampled from, and u() a uniform of the named purpose at the row's position:

        GREEDY        choice = argmax of the processed logits
        TARGET_MATCH  choice = own[row]
        TOPP          choice = the child if target[row][child] > 0 else own[row]
        REJECTION     left = target[row], then for the i-th child with token x:
                          choice = x, done, if u(ACCEPT, i) * draft_probs[row][x] < left[x]
                          left = max(left - draft_probs[row], 0), renormalized
                      choice = a token sampled from left by u(RESIDUAL), if no child is accepted
                      choice = own[row] if the row has no child
        BLOCK         Sun et al. 2024, algorithm 2. It reads uniforms past the accepted prefix; the
                      anchor positions[b] + 1 of every uniform keeps later steps from reusing them

    Under ACCEPT_ALL choice is the child if there is one. Under REJECT_ALL the walk ends at the
    root. Under SYNTHETIC draft i is accepted if u(ACCEPT) < accept_rates[b, i]; otherwise own[row]
    ends the walk. A draft less than 0 is no token: it is never accepted, and later siblings are
    ignored. A draft past the vocabulary is a token of probability 0: it is never accepted,
    whatever the policy, and counts as rejected.

    Args:
        logits: [num_output_rows, vocab_size], float32 or bfloat16; rows may be strided. Rows from
            output_indptr[batch] on are not read.
        drafts: drafts of every request; k at most 3,072 with `parents`.
        positions: [batch], int32. Absolute position of the first token chosen for the request.
        strategy: [batch], int32, or one `VerifyStrategy` for all requests; absent: TARGET_MATCH.
            With `parents` GREEDY, TARGET_MATCH or REJECTION.
        policy: [batch], int32, or one `AcceptPolicy`; absent: NORMAL. With `parents` NORMAL or
            REJECT_ALL.
        accept_rates: [batch, k], float32, within [0, 1]. For SYNTHETIC.
        sampling: temperature, filters and random numbers per request; absent: all are greedy.
        processors: changes of the logits before the filters. The drafts before a row count as
            output tokens.
        draft_probs: distributions that the drafts were drawn from; absent: each draft had
            probability 1, as with drafters that do not sample.
        processed_logprobs: whether logprobs and ranks come from target[row] (at temperature 0 and
            under GREEDY: from the processed logits) instead of the untouched logits.
        outputs: tensors to write; absent: the two that are returned.
        workspace: [bytes], uint8, from `sampling_workspace`. Allocated when absent and needed.

    Returns:
        (token_ids, num_accepted_tokens) of the outputs: the emitted tokens, then -1; and the number
        of accepted drafts, which does not count the bonus token.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or a value of a request
            that is not idle is out of its range; nothing has been written. On CUDA a request with
            such a value emits nothing, like an idle one, and `check_errors` raises.

    Note:
        Deterministic. Under TARGET_MATCH a row's choice is bit for bit that of `sample` for the
        row; under every strategy it depends on its own request alone. A tree that is a chain gives
        the chain's result. Parameters of idle requests are not read.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding";
        Miao et al. 2024, "SpecInfer" (siblings); Sun et al. 2024, "Block Verification Accelerates
        Speculative Decoding"; FastDeploy's top_p verification (TOPP).
    """
    tokens: Any = getattr(outputs, "token_ids", outputs)
    accepted: Any = getattr(outputs, "num_accepted_tokens", outputs)
    if tokens is None or accepted is None:
        if tokens is None:
            tokens = empty(
                lambda: (
                    (drafts.token_ids.shape[0], drafts.token_ids.shape[1] + 1),
                    torch.int32,
                    drafts.token_ids,
                )
            )
        if accepted is None:
            accepted = empty(lambda: (drafts.token_ids.shape[:1], torch.int32, drafts.token_ids))
        outputs = VerifyOutputs(tokens, accepted, *(outputs or ())[2:])
    if workspace is None:
        workspace = _workspace(logits, drafts)
    assert outputs is not None
    _C.verify(
        logits,
        drafts,
        positions,
        strategy,
        policy,
        accept_rates,
        sampling,
        processors,
        draft_probs,
        processed_logprobs,
        outputs,
        workspace,
    )
    return tokens, accepted


def top_logprobs(
    logits: Tensor,
    n: int,
    *,
    processed_logprobs: bool = False,
    drafts: Drafts | None = None,
    positions: Tensor | None = None,
    sampling: SamplingTensors | None = None,
    processors: LogitsProcessors | None = None,
    outputs: TopLogprobsOutputs | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the n most probable tokens of every row.

    Same as `reference.top_logprobs`: tokens by (logit descending, id ascending), with
    `log_softmax(logits)`. With `processed_logprobs`, tokens by processed logit, with the log of the
    distribution that `sample` samples: -inf for tokens that the filters drop, and for tokens whose
    probability relative to the first is below what float32 can represent, about e^-87.

    Args:
        logits: [rows, vocab_size], float32 or bfloat16; rows may be strided. NaN counts as -inf,
            +inf as the largest finite float.
        n: 0 to vocab_size; the width of the outputs.
        processed_logprobs: whether the processors and filters below are applied first. Only then
            are the next four arguments used, with the same meaning as in `verify`.
        drafts: drafts and rows of each request; absent: one row each, without drafts. Rows from
            output_indptr[batch] on belong to no request and stay unprocessed.
        positions: [batch], int32. Required by processors.
        sampling: temperature and filters; seeds and choice_index are not read. Temperature 0 counts
            as 1 here: the log-softmax of the processed logits.
        processors: changes of the logits, applied first.
        outputs: tensors to write; absent: the three that are returned.
        workspace: [bytes], uint8, from `sampling_workspace`. Allocated when absent and needed.

    Returns:
        (token_ids, logprobs, lse) of the outputs: lse is the natural log of the sum of exp of the
        untouched logits. If every logit of a row is -inf or NaN, ids ascend from 0 and everything
        else is -inf.

    Raises:
        ValueError: n is out of range, a shape, dtype, layout or device differs from the above, or a
            parameter is out of its range. On CUDA such a parameter yields tokens -1 for the
            request's rows, and `check_errors` raises.

    Note:
        Deterministic. A logprob has the same bits as the one that `sample` and `verify` report for
        that token.
    """
    token_ids: Any = getattr(outputs, "token_ids", outputs)
    logprobs: Any = getattr(outputs, "logprobs", outputs)
    lse: Any = getattr(outputs, "lse", outputs)
    if token_ids is None or logprobs is None:
        check_int("top_logprobs", "n", n)
    if token_ids is None or logprobs is None or lse is None:
        # The op rejects an n above vocab_size; min keeps the allocations small until then.
        if token_ids is None:
            token_ids = empty(
                lambda: ((logits.shape[0], min(n, logits.shape[1])), torch.int32, logits)
            )
        if logprobs is None:
            logprobs = empty(
                lambda: ((logits.shape[0], min(n, logits.shape[1])), torch.float32, logits)
            )
        if lse is None:
            lse = empty(lambda: (logits.shape[:1], torch.float32, logits))
        ranks = None if outputs is None else outputs.ranks
        outputs = TopLogprobsOutputs(token_ids, logprobs, ranks, lse)
    if workspace is None:
        workspace = _workspace(logits)
    assert outputs is not None
    _C.top_logprobs(
        logits,
        n,
        processed_logprobs,
        drafts,
        positions,
        sampling,
        processors,
        outputs,
        workspace,
    )
    return token_ids, logprobs, lse


# Phases of a block of `verify` on CUDA; see `set_verify_stamps`.
VERIFY_PHASES = ("scan", "choose", "walk")


def set_verify_stamps(stamps: Tensor | None) -> None:
    """Make `verify` on CUDA record the time of each phase in each block (for benchmarks).

    Calls then run a slower build of the kernel that records time stamps and gives the same bits.
    That build exists for bfloat16 without processors only; while recording is on, other calls on
    CUDA fail. A captured graph keeps the setting that was active at its capture.

    Args:
        stamps: [blocks, 6], int64, on CUDA; one row for each block of the grid. There is a block
            for each of the k + 1 rows of a request; with few rows there are more blocks, at most
            two per SM. The tensor must live until the last such call has ended. Row b receives, for
            block b: its start and end in nanoseconds on a clock common to all blocks; the SM cycles
            spent in each of `VERIFY_PHASES`; and the low 32 bits of the SM's clock at the end. None
            stops recording, the default.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.
    """
    _C.set_verify_stamps(stamps)


def sampling_workspace(logits: Tensor, batch: int = 0) -> Tensor | None:
    """Allocate the workspace that GPU blocks share in `sample`, `verify` and `top_logprobs`.

    It is zeroed, and every call leaves it zeroed. A workspace for the largest logits and batch also
    serves smaller calls, but only one call at a time: concurrent streams need one each.

    Args:
        logits: [rows, vocab_size], the logits of the call.
        batch: requests of a `verify` call; 0 for the others.

    Returns:
        [bytes], uint8, or None if the call needs no workspace, as always on cpu.

    Raises:
        ValueError: logits are no matrix, or batch is negative.
    """
    if not isinstance(logits, Tensor) or logits.is_nested or logits.dim() != 2:
        raise ValueError(
            f"sampling_workspace: logits must be [rows, vocab_size], got {describe(logits)}"
        )
    num_bytes = _workspace_bytes(logits, batch)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=logits.device) if num_bytes else None


def _workspace_bytes(logits: Tensor, batch: int) -> int:
    rows, vocab_size = logits.shape
    return _C.sampling_workspace_bytes(
        rows, vocab_size, logits.element_size(), batch, logits.get_device()
    )


def _workspace(logits: Tensor, drafts: Drafts | None = None) -> Tensor | None:
    """Allocate a `sampling_workspace` for arguments that the op has not checked yet."""
    num_bytes = try_or_none(
        lambda: _workspace_bytes(logits, 0 if drafts is None else len(drafts.token_ids))
    )
    return torch.zeros(num_bytes, dtype=torch.uint8, device=logits.device) if num_bytes else None


def commit(
    emitted: EmittedTokens,
    slots: Tensor,
    token_ids: Tensor,
    lens: Tensor,
    *,
    prompt_lens: Tensor | None = None,
    rules: EndingRules | None = None,
    counts: TokenCounts | None = None,
    status: RequestStatus | None = None,
    num_committed_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Append the tokens that a step emitted, up to the end of each request, IN PLACE.

    Same as `reference.commit`. The first four arguments alone append the tokens to the requests'
    rows; each further field enables its rule. For request b with s = slots[b], unless
    finish_reasons[s] says that it has ended:

        L = number of ids in inject_token_ids[s]
        for token in emitted.token_ids[b] up to its first -1:
            n = lens[s] + 1 - prompt_lens[s]             the output tokens, including this one
            may_stop = n >= min_tokens[s]

            state = thinking_state[s]       0 thinking; 1 .. L the next to inject; L + 1 + c done,
                                            c tokens into the reply; -1 no thinking here
            if state == 0 and token == think_end_token_id[s]:
                state = L + 1
            else:
                if state == 0 and (n > thinking_budget[s]
                                   or L > 0 and may_stop and token in stop_token_ids[s]):
                    state = 1
                if 1 <= state <= L:
                    token = inject_token_ids[s, state - 1]         it ends the step, see below
                if state >= 1:
                    state += 1

            token_ids[s, lens[s]] = token;  lens[s] += 1;  token_counts of it += 2
            if may_stop and token in stop_token_ids[s]:                      STOP_TOKEN, its index
            elif may_stop and the output ends with one of stop_sequences[s]: STOP_SEQUENCE, lowest
            elif lens[s] >= max_lens[s] or state > L + reply_budget[s]:      LENGTH
            stop here if the request has ended or the token was injected

    Tokens that were not committed are overwritten in `emitted`, with -1, logprob 0 and rank 0. An
    injected token has logprob 0 and rank 1. The division of a request's tokens into steps makes no
    difference: tokens after an injected one were computed from another token, and are dropped.

    Args:
        emitted: tokens of the step. Truncated.
        slots: [batch], int32. Row of each request in all arguments of shape [num_slots, ..]; no two
            requests may share one (checked on cpu). -1: nothing of the request is read or written.
        token_ids: [num_slots, max_len], int32. Prompt and output; rows may be strided. Appended to.
        lens: [num_slots], int32. Number of tokens in each row. Written.
        prompt_lens: [num_slots], int32. Number of prompt tokens of the row; at least 0.
        rules: rules that end a request or its thinking. `min_tokens`, `stop_sequences` and
            `thinking_budget` require `prompt_lens`.
        counts: token counts of every slot. Written.
        status: finish reasons and thinking states, required by the rules that set them. Written.
        num_committed_tokens: [batch], int32. Receives the number of appended tokens.

    Returns:
        (`token_ids`, `lens`).

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; an argument that a rule
            requires is absent; a slot is out of range, or a row of `token_ids` or `counts` is full.
            Nothing has been written then. On CUDA a request with such a slot or row stays
            unchanged, and `check_errors` raises.

    Note:
        Deterministic; one launch, after which the next step can start without a host read.

    Source: FastDeploy's unified_update_model_status, speculate_set_stop_value_multi_seqs and
        speculate_limit_thinking_content_length, merged into one rule.
    """
    _C.commit(
        emitted,
        slots,
        token_ids,
        lens,
        prompt_lens,
        rules,
        counts,
        status,
        num_committed_tokens,
    )
    return token_ids, lens


def count_tokens(
    token_ids: Tensor,
    prompt_len: int,
    *,
    counted_token_ids: Tensor,
    token_counts: Tensor,
) -> None:
    """Fill a new request's row of the tables that penalties read and `commit` updates.

    Args:
        token_ids: [n], int32. The request's tokens so far, the prompt first; each at least 0.
        prompt_len: number of prompt tokens among them.
        counted_token_ids: [m], int32, a row of the table. Receives the distinct tokens, ascending,
            then -1.
        token_counts: [m], int32, a row of the table. Receives 2 * (times in the output) + (1 if in
            the prompt), and 0 where the token is -1.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a token is negative;
            there are more distinct tokens than fit; prompt_len is not within [0, n]. Nothing has
            been written then.

    Note:
        Not for the hot path: on CUDA the host waits for the number of distinct tokens.
    """
    rows = {
        "token_ids": token_ids,
        "counted_token_ids": counted_token_ids,
        "token_counts": token_counts,
    }
    for name, row in rows.items():
        is_row = isinstance(row, Tensor) and not row.is_nested and row.dim() == 1
        if not is_row or row.dtype != torch.int32 or row.layout != torch.strided:
            _refuse_count(name, f"int32 [{'n' if row is token_ids else 'm'}]", describe(row))
        if not row.is_contiguous():
            _refuse_count(name, "contiguous", f"strides {list(row.stride())}")
        if row.device != token_ids.device:
            _refuse_count(name, f"on {token_ids.device} like token_ids", f"on {row.device}")
    if token_counts.shape != counted_token_ids.shape:
        _refuse_count("token_counts", f"int32 [m={len(counted_token_ids)}]", describe(token_counts))
    check_int("count_tokens", "prompt_len", prompt_len)
    if prompt_len > len(token_ids):
        _refuse_count("prompt_len", f"within [0, {len(token_ids)}]", str(prompt_len))
    distinct, places = torch.unique(token_ids, return_inverse=True)
    size = len(distinct)
    if size > len(counted_token_ids):
        _refuse_count(
            "counted_token_ids",
            f"of at least {size} elements, one for each distinct token",
            str(len(counted_token_ids)),
        )
    if size > 0 and distinct[0] < 0:
        _refuse_count("token_ids", "of ids of at least 0", str(int(distinct[0])))
    in_prompt = torch.bincount(places[:prompt_len], minlength=size).clamp(max=1)
    in_output = torch.bincount(places[prompt_len:], minlength=size)
    counted_token_ids[:size] = distinct
    counted_token_ids[size:] = -1
    token_counts[:size] = 2 * in_output + in_prompt
    token_counts[size:] = 0


def _refuse_count(name: str, expected: str, got: str) -> NoReturn:
    raise ValueError(f"count_tokens: {name} must be {expected}, got {got}")
