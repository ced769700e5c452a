# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens: one sampled token per row, verification of drafts, and the most probable tokens.

Every choice is a function of its own row, its request's parameters, and the absolute position of
the token being chosen. `verify` and `sample` share one row function, so speculation changes no bit.
"""

from enum import IntEnum

import torch
from torch import Tensor

from specops import _C
from specops._wrong import unless_wrong


class VerifyStrategy(IntEnum):
    """What `verify` compares a draft with; values of its `strategy` argument."""

    GREEDY = 0
    """The row's argmax, whatever the sampling parameters: the tokens of greedy decoding."""
    TARGET_MATCH = 1
    """The token `sample` chooses for the row: the tokens of seeded sampling without speculation."""


class AcceptPolicy(IntEnum):
    """How `verify` treats a request's drafts; values of its `policy` argument."""

    NORMAL = 0
    """Accept while the strategy agrees."""
    ACCEPT_ALL = 1
    """Emit every draft, then the bonus token. For measurements: the text is not the target's."""
    REJECT_ALL = 2
    """Emit the first row's token only: the text is the target's, and speculation gains nothing."""


def sample(
    logits: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    choice_index: Tensor | None = None,
    logprobs: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Chooses one token per row.

    Same as `reference.sample`. With tokens ordered by (logit descending, id ascending):

        weight = exp((logit - max) / temperature)            temperature 0: the first token, done
        keep the first top_k tokens
        keep the smallest prefix whose weight is at least top_p of what is kept
        keep weights of at least min_p
        token = the first kept id, ascending, at which the running weight exceeds u * kept weight

    u is the first word of Philox4x32-10 under the row's seed at the counter
    (position, 3 = target, choice_index, 0), its upper 24 bits times 2^-24.

    Args:
        logits: [rows, vocab_size], float32 or bfloat16; rows may be strided. NaN counts as -inf,
            +inf as the largest finite float.
        positions: [rows], int32. Absolute position of the token being chosen.
        temperature: [rows], float32. 0 is greedy; absent: every row is, and the next five, which
            would change nothing, must be absent too.
        top_k: [rows], int32. 0 or -1 is off; absent: off.
        top_p: [rows], float32, within [0, 1]. 1 is off; 0 keeps the first token; absent: off.
        min_p: [rows], float32, within [0, 1]. 0 is off; absent: off.
        seeds: [rows], int64. The bits of an unsigned 64-bit seed. Given wherever temperature is:
            rows never share a seed unasked.
        choice_index: [rows], int32. Which of a prompt's completions the row belongs to; absent: 0.
        logprobs: [rows], float32. Receives the log-softmax of the untouched logits at the chosen
            token.
        out: [rows], int32. Allocated when absent.
        workspace: [bytes], uint8, of `sampling_workspace`. Allocated when absent and needed: only
            on CUDA, and only where few rows are shared by many blocks.

    Returns:
        `out`. A row without a finite logit or +inf yields token 0 with logprob -inf.

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
    if out is None:
        out = unless_wrong(
            lambda: torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        )
    if workspace is None:
        workspace = unless_wrong(lambda: sampling_workspace(logits))
    _C.sample(
        logits,
        positions,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        choice_index,
        logprobs,
        out,
        workspace,
    )
    return out


def verify(
    logits: Tensor,
    output_indptr: Tensor,
    draft_token_ids: Tensor,
    *,
    positions: Tensor,
    strategy: Tensor | None = None,
    policy: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    choice_index: Tensor | None = None,
    logprobs: Tensor | None = None,
    output_token_ids: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Emits the drafts that agree with the target, and one token more.

    Same as `reference.verify`. Request b owns rows output_indptr[b] .. output_indptr[b + 1]; with n
    rows it has n - 1 drafts, and with none it is idle and emits nothing. For a request:

        choice[i] = sample(row i, position positions[b] + i)         strategy GREEDY: temperature 0
        accepted  = how many leading i < n - 1 have draft[i] == choice[i]
        emitted   = choice[0 .. accepted]

    Under ACCEPT_ALL choice[i] of a row with a draft is the draft; under REJECT_ALL accepted is 0. A
    draft of -1 is never accepted and ends the walk.

    Args:
        logits: [num_output_rows, vocab_size], float32 or bfloat16; rows may be strided. Rows from
            output_indptr[batch] on are not read.
        output_indptr: [batch + 1], int32. Starts at 0, ascends by at most k + 1.
        draft_token_ids: [batch, k], int32. -1 padded; entries past a request's drafts are not read.
        positions: [batch], int32. Absolute position of the first token chosen for the request.
        strategy: [batch], int32. `VerifyStrategy`; absent: TARGET_MATCH.
        policy: [batch], int32. `AcceptPolicy`; absent: NORMAL.
        temperature: [batch], float32. As in `sample`; so are the next five. All absent: greedy.
        top_k: [batch], int32.
        top_p: [batch], float32.
        min_p: [batch], float32.
        seeds: [batch], int64.
        choice_index: [batch], int32.
        logprobs: [batch, k + 1], float32. Receives the log-softmax of the untouched logits at every
            emitted token, and 0 elsewhere.
        output_token_ids: [batch, k + 1], int32. Allocated when absent.
        num_accepted_tokens: [batch], int32. Allocated when absent.
        workspace: [bytes], uint8, of `sampling_workspace`. Allocated when absent and needed.

    Returns:
        (`output_token_ids`, `num_accepted_tokens`): the emitted tokens, then -1; and how many
        drafts were accepted, the bonus token not counted.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or a value of a request
            that is not idle is out of its range; nothing has been written. On CUDA a request with
            such a value emits nothing, as an idle one, and `check_errors` raises.

    Note:
        Deterministic. A row's choice is bit for bit what `sample` gives for that row. Parameters of
        idle requests are not read.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".
    """
    if output_token_ids is None:
        output_token_ids = unless_wrong(
            lambda: torch.empty(
                draft_token_ids.shape[0],
                draft_token_ids.shape[1] + 1,
                dtype=torch.int32,
                device=logits.device,
            )
        )
    if num_accepted_tokens is None:
        num_accepted_tokens = unless_wrong(
            lambda: torch.empty(draft_token_ids.shape[0], dtype=torch.int32, device=logits.device)
        )
    if workspace is None:
        workspace = unless_wrong(lambda: sampling_workspace(logits, draft_token_ids.shape[0]))
    _C.verify(
        logits,
        output_indptr,
        draft_token_ids,
        positions,
        strategy,
        policy,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        choice_index,
        output_token_ids,
        num_accepted_tokens,
        logprobs,
        workspace,
    )
    return output_token_ids, num_accepted_tokens


def top_logprobs(
    logits: Tensor,
    n: int,
    *,
    token_ids: Tensor | None = None,
    logprobs: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the n most probable tokens of every row.

    Same as `reference.top_logprobs`: tokens by (logit descending, id ascending), with
    `log_softmax(logits)`.

    Args:
        logits: [rows, vocab_size], float32 or bfloat16; rows may be strided. NaN counts as -inf,
            +inf as the largest finite float.
        n: 0 to vocab_size.
        token_ids: [rows, n], int32. Allocated when absent.
        logprobs: [rows, n], float32. Allocated when absent.
        lse: [rows], float32. Allocated when absent.
        workspace: [bytes], uint8, of `sampling_workspace`. Allocated when absent and needed.

    Returns:
        (`token_ids`, `logprobs`, `lse`): lse is the natural log of the sum of exp(logits). Where no
        logit is finite or +inf, ids ascend from 0 and everything else is -inf.

    Raises:
        ValueError: n is out of range, or a shape, dtype, layout or device differs from the above.

    Note:
        Deterministic. A logprob is bit for bit what `sample` and `verify` report for that token.
    """
    if n < 0:
        raise ValueError(f"top_logprobs: n must be at least 0, got {n}")
    if token_ids is None:
        token_ids = unless_wrong(
            lambda: torch.empty(logits.shape[0], n, dtype=torch.int32, device=logits.device)
        )
    if logprobs is None:
        logprobs = unless_wrong(
            lambda: torch.empty(logits.shape[0], n, dtype=torch.float32, device=logits.device)
        )
    if lse is None:
        lse = unless_wrong(
            lambda: torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        )
    if workspace is None:
        workspace = unless_wrong(lambda: sampling_workspace(logits))
    _C.top_logprobs(logits, token_ids, logprobs, lse, workspace)
    return token_ids, logprobs, lse


def sampling_workspace(logits: Tensor, batch: int = 0) -> Tensor | None:
    """Makes the memory that blocks of a GPU share in `sample`, `verify` and `top_logprobs`.

    It begins with zeros, and every call leaves it so. One made for the largest logits and batch
    serves smaller ones too, but one call at a time: concurrent streams need one each.

    Args:
        logits: [rows, vocab_size], of the call.
        batch: Requests of a `verify` call; 0 for the others.

    Returns:
        [bytes], uint8, or None where the call needs none, as always on cpu.
    """
    rows, vocab_size = logits.shape
    num_bytes = _C.sampling_workspace_bytes(
        rows, vocab_size, logits.element_size(), batch, logits.get_device()
    )
    if num_bytes == 0:
        return None
    return torch.zeros(num_bytes, dtype=torch.uint8, device=logits.device)


def commit_tokens(
    output_token_ids: Tensor, slots: Tensor, token_ids: Tensor, lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Appends what a step emitted to the tokens of each request, IN PLACE.

    Same as `reference.commit_tokens`. For request b, with s = slots[b] and n tokens in
    output_token_ids[b] before its first -1:

        token_ids[s, lens[s] : lens[s] + n] = output_token_ids[b, :n]
        lens[s] += n

    Args:
        output_token_ids: [batch, k + 1], int32. As `verify` leaves them: the tokens, then -1.
        slots: [batch], int32. Row of `token_ids` of each request; -1 appends nothing. No two
            requests share a row.
        token_ids: [num_slots, max_len], int32. Rows may be strided. Written.
        lens: [num_slots], int32. How many tokens each row holds. Written.

    Returns:
        (`token_ids`, `lens`).

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, a slot is out of range,
            or a row has no room; nothing has been written then.

    Note:
        Deterministic; it is what lets a drafter on the device see the tokens of the step that has
        just been verified.

    Source: FastDeploy's speculate_set_value_by_flags_and_idx.
    """
    _C.commit_tokens(output_token_ids, slots, token_ids, lens)
    return token_ids, lens
