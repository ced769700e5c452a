# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens: one sampled token per row, verification of drafts, and the most probable tokens.

Every choice is a function of its own row, its request's parameters, and the absolute position of
the token being chosen. `verify` and `sample` share one row function, so speculation changes no bit.
"""

from enum import IntEnum
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from specops import _C
from specops._wrong import check_int, describe, empty, unless_wrong


class VerifyStrategy(IntEnum):
    """How `verify` decides about drafts; values of its `strategy` argument."""

    GREEDY = 0
    """The row's argmax, whatever the filters: the tokens of greedy decoding."""
    TARGET_MATCH = 1
    """The token `sample` chooses for the row: the tokens of seeded sampling without speculation."""
    REJECTION = 2
    """Accepted with min(1, target / draft), else the residual: the target's distribution."""
    BLOCK = 3
    """Drafts are accepted together: the target's distribution, and never fewer tokens on average
    than REJECTION. Chains only."""
    TOPP = 4
    """FastDeploy's rule: any draft that the filters keep. BIASED to the drafter. Chains only."""


class AcceptPolicy(IntEnum):
    """How `verify` treats a request's drafts; values of its `policy` argument."""

    NORMAL = 0
    """Accept while the strategy agrees."""
    ACCEPT_ALL = 1
    """Emit every draft, then the bonus token. For measurements: the text is not the target's."""
    REJECT_ALL = 2
    """Emit the first row's token only: the text is the target's, and speculation gains nothing."""
    SYNTHETIC = 3
    """Emit drafts at given rates. For measurements: the text is not the target's."""


class Purpose(IntEnum):
    """The use of a random number; the streams of two purposes never overlap."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    TARGET = 3


class LogitsProcessors(NamedTuple):
    """Changes of the logits before the filters. Every field may be None: off.

    Tables have a row per slot and stay where they are while requests come and go. A row of logits
    whose request is in slot s, with `drafts` between the known tokens and the row, becomes

        x = -inf                                        where the mask disallows the token
        x = -inf                                        where it completes a bad word
        x = -inf                                        where it stops, and min_tokens are not there
        x += logit_bias
        x = x / repetition_penalty if x > 0 else x * repetition_penalty       where it occurs so far
        x -= frequency_penalty * (times in the output, drafts included)
        x -= presence_penalty                                where it is in the output or the drafts

    each step rounded to float32 and the result to the logits' dtype, as edits in place would be. So
    a row's drafts count as if they had been emitted, and speculation changes nothing.

    Attributes:
        slots: [batch], int32. Row of the tables of each request; -1 is none.
        token_ids: [num_slots, max_len], int32. The tokens so far, of which a request has the first
            positions[b]. Needed by bad_words. Rows may be strided.
        prompt_lens: [num_slots], int32. Needed by min_tokens.
        counted_token_ids: [num_slots, n], int32. The distinct tokens so far, ascending, then -1.
            Needed by penalties. `commit` keeps it and the next.
        token_counts: [num_slots, n], int32. 2 * (times in the output) + (1 if in the prompt).
        repetition_penalty: [num_slots], float32, above 0. 1 is off.
        presence_penalty: [num_slots], float32. 0 is off.
        frequency_penalty: [num_slots], float32. 0 is off.
        logit_bias_token_ids: [num_slots, n], int32, ascending, then -1.
        logit_bias: [num_slots, n], float32.
        bad_words: [num_slots, n, m], int32. Token sequences, each -1 padded at its end.
        stop_token_ids: [num_slots, n], int32, -1 padded. Needed by min_tokens.
        min_tokens: [num_slots], int32. Of output, before which the stop tokens are forbidden.
        allowed_token_mask: [num_masks, ceil(vocab_size / 32)], int32. Bit i % 32 of word i / 32 is
            set where token i is allowed.
        mask_indices: [rows of logits], int32. Row of the mask of each; -1 allows every token.
    """

    slots: Tensor | None = None
    token_ids: Tensor | None = None
    prompt_lens: Tensor | None = None
    counted_token_ids: Tensor | None = None
    token_counts: Tensor | None = None
    repetition_penalty: Tensor | None = None
    presence_penalty: Tensor | None = None
    frequency_penalty: Tensor | None = None
    logit_bias_token_ids: Tensor | None = None
    logit_bias: Tensor | None = None
    bad_words: Tensor | None = None
    stop_token_ids: Tensor | None = None
    min_tokens: Tensor | None = None
    allowed_token_mask: Tensor | None = None
    mask_indices: Tensor | None = None


class FinishReason(IntEnum):
    """Why `commit` ended a request; values of its `finish_reasons` argument."""

    RUNNING = 0
    """It has not ended."""
    STOP_TOKEN = 1
    """One of its stop token ids was emitted; it is the last token of the output."""
    STOP_SEQUENCE = 2
    """One of its stop sequences was completed; its tokens are the last of the output."""
    LENGTH = 3
    """It has as many tokens as it may have, or its reply has."""


def sample(
    logits: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | float | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    typical_p: Tensor | float | None = None,
    seeds: Tensor | None = None,
    choice_index: Tensor | int | None = None,
    processors: LogitsProcessors | None = None,
    purpose: Purpose = Purpose.TARGET,
    anchors: Tensor | None = None,
    processed_logprobs: bool = False,
    logprobs: Tensor | None = None,
    ranks: Tensor | None = None,
    probs: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Chooses one token per row.

    Same as `reference.sample`. After `processors`, and with tokens ordered by (logit descending, id
    ascending):

        weight = exp((logit - max) / temperature)            temperature 0: the first token, done
        keep the first top_k tokens
        keep the smallest prefix whose weight is at least top_p of the kept tokens'
        keep weights of at least min_p
        keep the smallest prefix by (|-log(weight / kept) - entropy|, id) that has typical_p of it
        token = the first kept id, ascending, at which the running weight exceeds u * kept weight

    u is the first word of Philox4x32-10 under the row's seed at the counter
    (position, purpose, choice_index, anchor), its upper 24 bits times 2^-24.

    Args:
        logits: [rows, vocab_size], float32 or bfloat16; rows may be strided. NaN counts as -inf,
            +inf as the largest finite float.
        positions: [rows], int32. Absolute position of the token being chosen.
        temperature: [rows], float32, or one number for all rows, as the next four may be. 0 is
            greedy; absent: every row is, and the next four, which greedy decoding ignores, must be
            absent too.
        top_k: [rows], int32. 0 or -1 is off; absent: off.
        top_p: [rows], float32, within [0, 1]. 1 is off; 0 keeps the first token; absent: off.
        min_p: [rows], float32, within [0, 1]. 0 is off; absent: off.
        typical_p: [rows], float32, within (0, 1]. 1 is off; absent: off.
        seeds: [rows], int64. The bits of an unsigned 64-bit seed. Needed where a temperature is
            above 0: rows never share a seed unasked.
        choice_index: [rows], int32, or one number. Which of a prompt's completions the row belongs
            to; absent: 0.
        processors: Changes of the logits, applied first, with a request per row; absent: none.
        purpose: TARGET, or DRAFT for the tokens of a drafter.
        anchors: [rows], int32. As BLOCK verification has them: position + 1 of the step's first
            token; absent: 0.
        processed_logprobs: Whether logprobs and ranks are of the distribution drawn from (at
            temperature 0: of the processed logits), instead of the untouched logits.
        logprobs: [rows], float32. Receives the log-softmax at the chosen token.
        ranks: [rows], int32. Receives 1 + how many logits are greater than the chosen token's.
        probs: [rows, vocab_size], float32. Receives the distribution drawn from, which `verify`
            takes as draft_probs; rows may be strided.
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
        out = empty(lambda: (logits.shape[:1], torch.int32, logits))
    if workspace is None:
        workspace = _workspace(logits)
    _C.sample(
        logits,
        positions,
        temperature,
        top_k,
        top_p,
        min_p,
        typical_p,
        seeds,
        choice_index,
        () if processors is None else processors,
        purpose,
        anchors,
        processed_logprobs,
        logprobs,
        ranks,
        probs,
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
    parents: Tensor | None = None,
    strategy: Tensor | VerifyStrategy | None = None,
    policy: Tensor | AcceptPolicy | None = None,
    temperature: Tensor | float | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    typical_p: Tensor | float | None = None,
    seeds: Tensor | None = None,
    choice_index: Tensor | int | None = None,
    processors: LogitsProcessors | None = None,
    draft_probs: Tensor | None = None,
    draft_prob_token_ids: Tensor | None = None,
    draft_prob_rows: Tensor | None = None,
    accept_rates: Tensor | None = None,
    processed_logprobs: bool = False,
    logprobs: Tensor | None = None,
    ranks: Tensor | None = None,
    output_token_ids: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    accepted_nodes: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Emits the path of drafts that agrees with the target, and one token more.

    Same as `reference.verify`. Request b owns rows output_indptr[b] .. output_indptr[b + 1]. Its
    first row is the root: it follows the last committed token. Row i + 1 follows draft i, so n rows
    verify n - 1 drafts, and a request without rows is idle and emits nothing. Drafts form a tree:
    draft i hangs on draft parents[b, i], or on the root where that is -1. Without `parents` they
    form a chain: draft i hangs on draft i - 1. With depth(row) the number of drafts from the root
    down to the row, for a request:

        choice[row] = the strategy's token of the row, at position positions[b] + depth(row)
        row = root
        while row has a child with the token choice[row]: emit it, row = the first such child
        emit choice[row]

    With own[row] the token that `sample` chooses for the row, target[row] the distribution it draws
    from (processors and filters applied), draft_probs[row] the one that the row's children came
    from, and u() a uniform of the named purpose at the row's position:

        GREEDY        choice = argmax of the processed logits
        TARGET_MATCH  choice = own[row]
        TOPP          choice = the child if target[row][child] > 0 else own[row]
        REJECTION     left = target[row], then for the i-th child with token x:
                          choice = x, done, if u(ACCEPT, i) * draft_probs[row][x] < left[x]
                          left = max(left - draft_probs[row], 0), renormalised
                      choice = a token drawn by u(RESIDUAL) from left, if no child is accepted
                      choice = own[row] where there is no child
        BLOCK         Sun et al. 2024, algorithm 2, with every uniform's anchor positions[b] + 1: it
                      looks at uniforms past the accepted prefix, which no later step may use again

    Under ACCEPT_ALL choice is the child where there is one; under REJECT_ALL the walk ends at the
    root; under SYNTHETIC draft i is taken where u(ACCEPT) < accept_rates[b, i], and own[row] ends
    the walk where it is not. A draft less than 0 is no token: it is never accepted, and no sibling
    after it is considered. A draft past the vocabulary is a token without any probability: it is
    never accepted either, whatever the policy, and counts as rejected.

    Args:
        logits: [num_output_rows, vocab_size], float32 or bfloat16; rows may be strided. Rows from
            output_indptr[batch] on are not read.
        output_indptr: [batch + 1], int32. Starts at 0, ascends by at most k + 1.
        draft_token_ids: [batch, k], int32. -1 padded; entries past a request's drafts are not read.
            Siblings may be equal.
        positions: [batch], int32. Absolute position of the first token chosen for the request.
        parents: [batch, k], int32, k at most 3,072. Draft i's parent, below i; -1 is the root.
            Absent: chains.
        strategy: [batch], int32, or one `VerifyStrategy` for all requests; absent: TARGET_MATCH.
            With `parents` GREEDY, TARGET_MATCH or REJECTION.
        policy: [batch], int32, or one `AcceptPolicy`; absent: NORMAL. With `parents` NORMAL or
            REJECT_ALL.
        temperature: [batch], float32, or one number. As in `sample`; so are the next six. All
            absent: greedy.
        top_k: [batch], int32.
        top_p: [batch], float32.
        min_p: [batch], float32.
        typical_p: [batch], float32.
        seeds: [batch], int64. Needed where a request draws: its temperature is above 0 and its
            strategy not GREEDY, or its policy is SYNTHETIC.
        choice_index: [batch], int32.
        processors: Changes of the logits, applied first; a row counts the drafts on its path.
        draft_probs: [batch, k, vocab_size] or, with draft_prob_token_ids, [batch, k, n], float32.
            Entry [b, i] is the distribution from which the children of the request's row i were
            drawn, independently of each other: in a chain, that of draft i. NaN and less than 0 are
            0, more than 1 is 1. Absent: each draft had probability 1, as with drafters that do not
            draw.
        draft_prob_token_ids: [batch, k, n], int32. The tokens that draft_probs are of, each once;
            -1 padded.
        draft_prob_rows: [batch], int32. Which row of draft_probs each request's drafts came from;
            -1: none, each had probability 1. draft_probs and draft_prob_token_ids are then
            [rows, k', ..] with k' at most k, and children of rows past the first k' had probability
            1. Absent: row b.
        accept_rates: [batch, k], float32, within [0, 1]. Of SYNTHETIC.
        processed_logprobs: Whether logprobs and ranks are of target[row] (at temperature 0 and
            under GREEDY: of the processed logits), instead of the untouched logits.
        logprobs: [batch, k + 1], float32. Receives the log-softmax at every emitted token, and 0
            elsewhere.
        ranks: [batch, k + 1], int32. Receives 1 + how many logits are greater than the emitted
            token's, and 0 elsewhere.
        output_token_ids: [batch, k + 1], int32. Allocated when absent.
        num_accepted_tokens: [batch], int32. Allocated when absent.
        accepted_nodes: [batch, k], int32. Receives the accepted drafts, from the root down, then
            -1, in the form that `attention.compact_kv` takes.
        workspace: [bytes], uint8, of `sampling_workspace`. Allocated when absent and needed.

    Returns:
        (`output_token_ids`, `num_accepted_tokens`): the emitted tokens, then -1; and how many
        drafts were accepted, the bonus token not counted.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or a value of a request
            that is not idle is out of its range; nothing has been written. On CUDA a request with
            such a value emits nothing, as an idle one, and `check_errors` raises.

    Note:
        Deterministic. A row's choice is bit for bit that of `sample` for the row under
        TARGET_MATCH, and in every strategy a function of its own request alone. A tree that is a
        chain gives the chain's result. Parameters of idle requests are not read.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding";
        Miao et al. 2024, "SpecInfer" (siblings); Sun et al. 2024, "Block Verification Accelerates
        Speculative Decoding"; FastDeploy's top_p verification (TOPP).
    """
    if output_token_ids is None:
        output_token_ids = empty(
            lambda: (
                (draft_token_ids.shape[0], draft_token_ids.shape[1] + 1),
                torch.int32,
                draft_token_ids,
            )
        )
    if num_accepted_tokens is None:
        num_accepted_tokens = empty(
            lambda: (draft_token_ids.shape[:1], torch.int32, draft_token_ids)
        )
    if workspace is None:
        workspace = _workspace(logits, draft_token_ids)
    _C.verify(
        logits,
        output_indptr,
        draft_token_ids,
        positions,
        parents,
        strategy,
        policy,
        temperature,
        top_k,
        top_p,
        min_p,
        typical_p,
        seeds,
        choice_index,
        () if processors is None else processors,
        draft_probs,
        draft_prob_token_ids,
        draft_prob_rows,
        accept_rates,
        processed_logprobs,
        logprobs,
        ranks,
        output_token_ids,
        num_accepted_tokens,
        accepted_nodes,
        workspace,
    )
    return output_token_ids, num_accepted_tokens


def top_logprobs(
    logits: Tensor,
    n: int,
    *,
    processed_logprobs: bool = False,
    output_indptr: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
    parents: Tensor | None = None,
    positions: Tensor | None = None,
    temperature: Tensor | float | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    typical_p: Tensor | float | None = None,
    processors: LogitsProcessors | None = None,
    token_ids: Tensor | None = None,
    logprobs: Tensor | None = None,
    ranks: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the n most probable tokens of every row.

    Same as `reference.top_logprobs`: tokens by (logit descending, id ascending), with
    `log_softmax(logits)`; or, of processed ones, tokens by processed logit, with the log of the
    distribution that `sample` draws from: -inf for tokens that the filters drop, and for tokens
    less probable than the first by more than float32 can represent, about e^-87.

    Args:
        logits: [rows, vocab_size], float32 or bfloat16; rows may be strided. NaN counts as -inf,
            +inf as the largest finite float.
        n: 0 to vocab_size; the width of `token_ids`.
        processed_logprobs: Whether the processors and filters below are applied first. The other
            arguments are only for these, with the same meaning as in `verify`.
        output_indptr: [batch + 1], int32. The rows of each request; absent: one row each. Rows from
            output_indptr[batch] on belong to no request and stay unprocessed.
        draft_token_ids: [batch, k], int32. Absent: no drafts.
        parents: [batch, k], int32. Of trees; absent: chains.
        positions: [batch], int32. Needed by processors.
        temperature: [batch], float32, or one number, as the next four may be. 0 is 1 here: the
            log-softmax of the processed logits.
        top_k: [batch], int32.
        top_p: [batch], float32.
        min_p: [batch], float32.
        typical_p: [batch], float32.
        processors: Changes of the logits, applied first.
        token_ids: [rows, n], int32. Allocated when absent.
        logprobs: [rows, n], float32. Allocated when absent.
        ranks: [rows, n], int32. Receives 1 + how many logits are greater than the token's.
        lse: [rows], float32. Allocated when absent.
        workspace: [bytes], uint8, of `sampling_workspace`. Allocated when absent and needed.

    Returns:
        (`token_ids`, `logprobs`, `lse`): lse is the natural log of the sum of exp(logits), the
        untouched ones. Where no logit is finite or +inf, ids ascend from 0 and everything else is
        -inf.

    Raises:
        ValueError: n is out of range, a shape, dtype, layout or device differs from the above, or a
            parameter is out of its range. On CUDA such a parameter yields tokens -1 for the
            request's rows, and `check_errors` raises.

    Note:
        Deterministic. A logprob has the bits of those that `sample` and `verify` report for that
        token.
    """
    if token_ids is None or logprobs is None:
        check_int("top_logprobs", "n", n)
    # An n beyond the vocabulary is refused before anything is made of it.
    if token_ids is None:
        token_ids = empty(lambda: ((logits.shape[0], min(n, logits.shape[1])), torch.int32, logits))
    if logprobs is None:
        logprobs = empty(
            lambda: ((logits.shape[0], min(n, logits.shape[1])), torch.float32, logits)
        )
    if lse is None:
        lse = empty(lambda: (logits.shape[:1], torch.float32, logits))
    if workspace is None:
        workspace = _workspace(logits)
    _C.top_logprobs(
        logits,
        n,
        processed_logprobs,
        output_indptr,
        draft_token_ids,
        parents,
        positions,
        temperature,
        top_k,
        top_p,
        min_p,
        typical_p,
        () if processors is None else processors,
        token_ids,
        logprobs,
        ranks,
        lse,
        workspace,
    )
    return token_ids, logprobs, lse


# Where a block of `verify` on CUDA spends its time; see `set_verify_stamps`.
VERIFY_PHASES = ("scan", "choose", "walk")


def set_verify_stamps(stamps: Tensor | None) -> None:
    """Has `verify` on CUDA note how long each of its blocks spends on what (benches).

    Calls then run another build of the kernel, which keeps time, and gives the same bits more
    slowly; the usual one has no trace of it. It exists for bfloat16 without processors; other calls
    on CUDA are refused meanwhile. A captured graph keeps what was set at its capture.

    Args:
        stamps: [blocks, 6], int64, on CUDA; a row for each block of the grid: one for each of the
            k + 1 rows of a request, or more where rows are few, at most two for each SM then. It
            must live until the last such call has ended, which leaves in row b, of its block b:
            when it began and ended, in nanoseconds by one clock for all blocks; the cycles of its
            SM that each of `VERIFY_PHASES` took; and the low 32 bits of that SM's clock at the end.
            None: no more stamps, the default.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.
    """
    _C.set_verify_stamps(stamps)


def sampling_workspace(logits: Tensor, batch: int = 0) -> Tensor | None:
    """Makes the memory that blocks of a GPU share in `sample`, `verify` and `top_logprobs`.

    It begins with zeros, and every call leaves it so. One made for the largest logits and batch
    serves smaller ones too, but one call at a time: concurrent streams need one each.

    Args:
        logits: [rows, vocab_size], of the call.
        batch: Requests of a `verify` call; 0 for the others.

    Returns:
        [bytes], uint8, or None where the call needs none, as always on cpu.

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


def _workspace(logits: Tensor, draft_token_ids: Tensor | None = None) -> Tensor | None:
    """`sampling_workspace` of arguments that the op has not checked yet."""
    num_bytes = unless_wrong(
        lambda: _workspace_bytes(logits, 0 if draft_token_ids is None else draft_token_ids.shape[0])
    )
    return torch.zeros(num_bytes, dtype=torch.uint8, device=logits.device) if num_bytes else None


def commit(
    output_token_ids: Tensor,
    slots: Tensor,
    token_ids: Tensor,
    lens: Tensor,
    *,
    logprobs: Tensor | None = None,
    ranks: Tensor | None = None,
    prompt_lens: Tensor | None = None,
    max_lens: Tensor | None = None,
    min_tokens: Tensor | None = None,
    stop_token_ids: Tensor | None = None,
    stop_sequences: Tensor | None = None,
    counted_token_ids: Tensor | None = None,
    token_counts: Tensor | None = None,
    think_end_token_id: Tensor | None = None,
    thinking_budget: Tensor | None = None,
    reply_budget: Tensor | None = None,
    inject_token_ids: Tensor | None = None,
    thinking_state: Tensor | None = None,
    finish_reasons: Tensor | None = None,
    stop_indices: Tensor | None = None,
    num_committed_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Appends the tokens that a step emitted, up to the end of each request, IN PLACE.

    Same as `reference.commit`. With the first four arguments alone, the tokens are appended to the
    requests' rows; each further one adds its rule, and one that is absent leaves it out. For
    request b with s = slots[b], unless it has ended already by finish_reasons[s]:

        L = how many ids inject_token_ids[s] holds
        for token in output_token_ids[b] up to its first -1:
            n = lens[s] + 1 - prompt_lens[s]             the output tokens, this one among them
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

    Tokens that were not committed are cut from output_token_ids, logprobs and ranks: -1, 0 and 0.
    An injected token is there with logprob 0 and rank 1. The division of a request's tokens into
    steps makes no difference: tokens after an injected one were computed from another, and are cut.

    Args:
        output_token_ids: [batch, k + 1], int32. As `verify` leaves them: the tokens, then -1. Cut.
        slots: [batch], int32. Row of each request in all that is [num_slots, ..]; no two requests
            share one, which cpu refuses. -1: nothing of the request is read or written.
        token_ids: [num_slots, max_len], int32. Prompt and output; rows may be strided. Appended to.
        lens: [num_slots], int32. How many tokens each row holds. Written.
        logprobs: [batch, k + 1], float32. Cut.
        ranks: [batch, k + 1], int32. Cut.
        prompt_lens: [num_slots], int32. How many tokens of the row are no output; at least 0.
        max_lens: [num_slots], int32. The request ends when its row holds as many; -1 is off.
        min_tokens: [num_slots], int32. Output tokens below which neither stop rule holds.
        stop_token_ids: [num_slots, n], int32. -1 padded.
        stop_sequences: [num_slots, n, m], int32. Each -1 padded; an empty one is unused. A sequence
            may have begun in an earlier step, but not in the prompt.
        counted_token_ids: [num_slots, n], int32. The distinct tokens so far, ascending, then -1;
            `count_tokens` fills a row. Written.
        token_counts: [num_slots, n], int32. 2 * (times in the output) + (1 if in the prompt).
            Written.
        think_end_token_id: [num_slots], int32. -1 is none.
        thinking_budget: [num_slots], int32. Output tokens after which thinking is ended: the next
            ones are those to inject, or with none of them the reply's. -1 is off.
        reply_budget: [num_slots], int32. Tokens after the thinking that end the request. -1 is off.
        inject_token_ids: [num_slots, n], int32. -1 padded. Injected where the budget is used up, or
            in the place of a stop token while still thinking.
        thinking_state: [num_slots], int32. As above: 0 or -1 to begin with. Written.
        finish_reasons: [num_slots], int32. `FinishReason`: RUNNING to begin with. Written.
        stop_indices: [num_slots], int32. Receives which of the stop tokens or sequences ended the
            request, and -1 where none did.
        num_committed_tokens: [batch], int32. Receives how many tokens were appended.

    Returns:
        (`token_ids`, `lens`).

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; an argument that a rule
            needs is absent; a slot is out of range, or a row of `token_ids` or `counted_token_ids`
            has no room. Nothing has been written then. On CUDA a request with such a slot or row
            stays unchanged, and `check_errors` raises.

    Note:
        Deterministic; one launch, and nothing the host must look at before the next step.

    Source: FastDeploy's unified_update_model_status, speculate_set_stop_value_multi_seqs and
        speculate_limit_thinking_content_length, made one rule.
    """
    _C.commit(
        output_token_ids,
        slots,
        token_ids,
        lens,
        logprobs,
        ranks,
        prompt_lens,
        max_lens,
        min_tokens,
        stop_token_ids,
        stop_sequences,
        counted_token_ids,
        token_counts,
        think_end_token_id,
        thinking_budget,
        reply_budget,
        inject_token_ids,
        thinking_state,
        finish_reasons,
        stop_indices,
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
    """Fills one row of the tables that penalties read and `commit` keeps, when a request enters.

    Args:
        token_ids: [n], int32. The request's tokens so far, the prompt first; at least 0.
        prompt_len: How many of them are the prompt.
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
