# SPDX-License-Identifier: Apache-2.0
"""Arguments of ops that belong together, as named tuples. Plain data."""

from typing import NamedTuple

from torch import Tensor


class SamplingTensors(NamedTuple):
    """Sampling parameters of each request or row, here called row. Every field may be None.

    Attributes:
        temperature: [rows], float32, or one number for all rows; the next four fields also accept
            one number. 0 is greedy. None: every row is greedy, and the next four, which greedy
            decoding ignores, must be None too.
        top_k: [rows], int32. 0 or -1 is off; None: off.
        top_p: [rows], float32, within [0, 1]. 1 is off; 0 keeps the first token; None: off.
        min_p: [rows], float32, within [0, 1]. 0 is off; None: off.
        typical_p: [rows], float32, within (0, 1]. 1 is off; None: off.
        seeds: [rows], int64. The bits of an unsigned 64-bit seed. Required if a random number is
            drawn: in `sample` if a temperature is above 0; in `verify` if so and the strategy is
            not GREEDY, or if the policy is SYNTHETIC. There is no default, since rows must not
            share a seed by accident.
        choice_index: [rows], int32, or one number. Index of the row's completion among those of its
            prompt; None: 0.
    """

    temperature: Tensor | float | None = None
    top_k: Tensor | int | None = None
    top_p: Tensor | float | None = None
    min_p: Tensor | float | None = None
    typical_p: Tensor | float | None = None
    seeds: Tensor | None = None
    choice_index: Tensor | int | None = None


class LogitsProcessors(NamedTuple):
    """Changes of the logits before the filters. Every field may be None: off.

    Tables have one row per slot, and stay in place while requests start and end. For a request in
    slot s, a row x of logits with `drafts` between the known tokens and the row becomes

        x = -inf                                        where the mask disallows the token
        x = -inf                                        where it completes a bad word
        x = -inf                                        where it is a stop token before min_tokens
        x += logit_bias
        x = x / repetition_penalty if x > 0 else x * repetition_penalty       where it occurs so far
        x -= frequency_penalty * (times in the output, drafts included)
        x -= presence_penalty                                where it is in the output or the drafts

    with each step rounded to float32 and the result to the logits' dtype, like edits in place. A
    row's drafts count as if they had been emitted, so speculation changes nothing.

    Attributes:
        slots: [batch], int32. Row of each request in the tables; -1: no row.
        token_ids: [num_slots, max_len], int32. The tokens so far; a request has the first
            positions[b] of its row. Required by bad_words. Rows may be strided.
        prompt_lens: [num_slots], int32. Required by min_tokens.
        counted_token_ids: [num_slots, n], int32. The distinct tokens so far, ascending, then -1.
            Required by penalties. `commit` updates this table and `token_counts`.
        token_counts: [num_slots, n], int32. 2 * (times in the output) + (1 if in the prompt).
        repetition_penalty: [num_slots], float32, above 0. 1 is off.
        presence_penalty: [num_slots], float32. 0 is off.
        frequency_penalty: [num_slots], float32. 0 is off.
        logit_bias_token_ids: [num_slots, n], int32, ascending, then -1.
        logit_bias: [num_slots, n], float32.
        bad_words: [num_slots, n, m], int32. Token sequences, each -1 padded at its end.
        stop_token_ids: [num_slots, n], int32, -1 padded. Required by min_tokens.
        min_tokens: [num_slots], int32. Number of output tokens before which stop tokens are
            forbidden.
        allowed_token_mask: [num_masks, ceil(vocab_size / 32)], int32. Bit i % 32 of word i / 32 is
            set where token i is allowed.
        mask_indices: [rows of logits], int32. Each row's mask; -1 allows every token.
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


class Drafts(NamedTuple):
    """Drafts of every request, with the rows of logits that verify them.

    Request b owns rows output_indptr[b] .. output_indptr[b + 1]. Its first row is the root: it
    follows the last committed token. Row i + 1 follows draft i, so n rows verify n - 1 drafts, and
    a request without rows is idle. Drafts form a tree: the parent of draft i is draft
    parents[b, i], or the root if that is -1.

    Attributes:
        output_indptr: [batch + 1], int32. Starts at 0, ascends by at most k + 1.
        token_ids: [batch, k], int32. -1 padded; entries past a request's drafts are not read.
            Siblings may be equal.
        parents: [batch, k], int32. Parent of draft i, less than i; -1 is the root. None: chains,
            where the parent of draft i is draft i - 1.
    """

    output_indptr: Tensor
    token_ids: Tensor
    parents: Tensor | None = None


class DraftProbs(NamedTuple):
    """Distributions that drafts were drawn from.

    Attributes:
        probs: [batch, k, vocab_size] or, with token_ids, [batch, k, n], float32. In a chain,
            probs[b, i] is the distribution that draft i of request b was sampled from. In a tree,
            it is the distribution of all children of node i (0: the root, i: draft i - 1), which
            were sampled from it independently of each other. NaN and values below 0 count as 0,
            values above 1 as 1.
        token_ids: [batch, k, n], int32. The token of each value of probs; no token may occur
            twice. -1 padded. None: value i is that of token i.
        rows: [batch], int32. Index into the first dimension of probs for each request; -1: each
            draft of the request had probability 1. probs and token_ids may then have any first
            dimension and a second dimension k' of at most k; children of nodes from k' on had
            probability 1. None: request b uses index b.
    """

    probs: Tensor
    token_ids: Tensor | None = None
    rows: Tensor | None = None


class SampleOutputs(NamedTuple):
    """Tensors that `sample` writes; a field that is None is not written.

    Attributes:
        token_ids: [rows], int32. Allocated when None.
        logprobs: [rows], float32. Receives the log-softmax at the chosen token.
        ranks: [rows], int32. Receives 1 + the number of logits greater than the chosen token's.
        probs: [rows, vocab_size], float32. Receives the distribution that is sampled, in the form
            of `DraftProbs`; rows may be strided.
    """

    token_ids: Tensor | None = None
    logprobs: Tensor | None = None
    ranks: Tensor | None = None
    probs: Tensor | None = None


class VerifyOutputs(NamedTuple):
    """Tensors that `verify` writes; a field that is None is not written.

    Attributes:
        token_ids: [batch, k + 1], int32. Receives the emitted tokens, then -1. Allocated when None.
        num_accepted_tokens: [batch], int32. Receives the number of accepted drafts. Allocated when
            None.
        accepted_nodes: [batch, k], int32. Receives the accepted drafts, from the root down, then
            -1, in the form that `attention.compact_kv` takes.
        logprobs: [batch, k + 1], float32. Receives the log-softmax at every emitted token, and 0
            elsewhere.
        ranks: [batch, k + 1], int32. Receives 1 + the number of logits greater than the emitted
            token's, and 0 elsewhere.
    """

    token_ids: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    accepted_nodes: Tensor | None = None
    logprobs: Tensor | None = None
    ranks: Tensor | None = None


class EmittedTokens(NamedTuple):
    """Tokens of a step, which `commit` truncates in place.

    Attributes:
        token_ids: [batch, k + 1], int32. Output of `verify`: the tokens, then -1.
        logprobs: [batch, k + 1], float32.
        ranks: [batch, k + 1], int32.
    """

    token_ids: Tensor
    logprobs: Tensor | None = None
    ranks: Tensor | None = None


class EndingRules(NamedTuple):
    """Rules that end a request or its thinking. Every field may be None: off.

    Attributes:
        max_lens: [num_slots], int32. The request ends when its row holds this many tokens; -1 is
            off.
        min_tokens: [num_slots], int32. Output tokens before which no stop rule applies.
        stop_token_ids: [num_slots, n], int32. -1 padded.
        stop_sequences: [num_slots, n, m], int32. Each -1 padded; an empty one is unused. A sequence
            may have begun in an earlier step, but not in the prompt.
        think_end_token_id: [num_slots], int32. -1: no such token.
        thinking_budget: [num_slots], int32. Output tokens after which thinking ends. Then the
            tokens to inject follow, if there are any, and the reply. -1 is off.
        reply_budget: [num_slots], int32. The request ends after this many tokens of reply. -1 is
            off.
        inject_token_ids: [num_slots, n], int32. -1 padded. Injected when the thinking budget is
            used up, or in place of a stop token while still thinking.
    """

    max_lens: Tensor | None = None
    min_tokens: Tensor | None = None
    stop_token_ids: Tensor | None = None
    stop_sequences: Tensor | None = None
    think_end_token_id: Tensor | None = None
    thinking_budget: Tensor | None = None
    reply_budget: Tensor | None = None
    inject_token_ids: Tensor | None = None


class TokenCounts(NamedTuple):
    """Tables that penalties read and `commit` updates; `count_tokens` fills a row.

    Attributes:
        counted_token_ids: [num_slots, n], int32. The distinct tokens so far, ascending, then -1.
        token_counts: [num_slots, n], int32. 2 * (times in the output) + (1 if in the prompt).
    """

    counted_token_ids: Tensor
    token_counts: Tensor


class RequestStatus(NamedTuple):
    """State of every slot that `commit` writes. Every field may be None.

    Attributes:
        finish_reasons: [num_slots], int32. `FinishReason`; initially RUNNING.
        stop_indices: [num_slots], int32. Receives the index of the stop token or sequence that
            ended the request, or -1.
        thinking_state: [num_slots], int32. As in `commit`; initially 0 or -1.
    """

    finish_reasons: Tensor | None = None
    stop_indices: Tensor | None = None
    thinking_state: Tensor | None = None


class TopLogprobsOutputs(NamedTuple):
    """Tensors that `top_logprobs` writes. All but `ranks` are allocated when None.

    Attributes:
        token_ids: [rows, n], int32.
        logprobs: [rows, n], float32.
        ranks: [rows, n], int32. Receives 1 + the number of logits greater than the token's.
        lse: [rows], float32.
    """

    token_ids: Tensor | None = None
    logprobs: Tensor | None = None
    ranks: Tensor | None = None
    lse: Tensor | None = None


class PagedKv(NamedTuple):
    """Keys and values of a layer on pages.

    Attributes:
        k: [num_pages, page_size, num_kv_heads, head_dim], float32, bfloat16, float16, int8 or
            float8_e4m3fn.
        v: shape and dtype of `k`. None: the keys are latents, which contain the values.
        k_scales: [num_pages, page_size, num_kv_heads], float32: the scales of the elements of `k`.
            Required by 8-bit caches, None with others.
        v_scales: as `k_scales`, for `v`.
    """

    k: Tensor
    v: Tensor | None = None
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


class PagedBatch(NamedTuple):
    """Rows and pages of every request of a call.

    Attributes:
        qo_indptr: [batch + 1], int32. Rows qo_indptr[b] to qo_indptr[b + 1] belong to request b;
            a request may have none.
        kv_indptr: [batch + 1], int32. Start of each request's pages in `kv_indices`.
        kv_indices: [pages], int32. Page ids, in order of position.
        kv_lens: [batch], int32. Length of each request, its rows of this call included.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_lens: Tensor


class AttentionMask(NamedTuple):
    """Bits that hide tokens which a row would otherwise see.

    Attributes:
        bits: [rows, words], int32. Bit j % 32 of word j // 32 of a row says whether the row sees
            the token at starts[b] + j of its request b. Tokens before starts[b] are seen, tokens
            after the last bit are not.
        starts: [batch], int32. None: each request's first row, so that bit j stands for its row j,
            as in the `ancestor_mask` of `build_tree`.
    """

    bits: Tensor
    starts: Tensor | None = None


class PrefixTensors(NamedTuple):
    """Groups of requests that begin with the same pages, in levels from the widest groups on.

    Attributes:
        leaders: [levels, batch], int32. Requests with the same value on a level are a group. They
            are neighbors, and the value is the index of the first. A group lies within one group
            of the level before.
        lens: [levels, batch], int32. Number of leading tokens that the group shares: the same value
            throughout the group, at least that of the level before and at most the kv_len - qo_len
            (with a mask, also the `starts` of the mask) of each request with rows. The members must
            name the same pages for these tokens. Ignored for a group of one.
    """

    leaders: Tensor
    lens: Tensor


class ModuleRows(NamedTuple):
    """Rows of a pass of an MTP module, from `batching.DraftIndices`.

    Attributes:
        row_to_request: [rows], int32; -1: no request.
        positions: [rows], int32.
        source_rows: [rows], int32. Row of the hidden states that each row reads, or -2 - i for row
            i of the kept hidden states.
    """

    row_to_request: Tensor
    positions: Tensor
    source_rows: Tensor


class TokenTables(NamedTuple):
    """Tokens of every request and the drafts after them, in tables with one row per slot.

    Attributes:
        slots: [batch], int32. Row of each request in the tables.
        token_ids: [num_slots, max_len], int32. Prompt and output of each request; rows may be
            strided.
        lens: [num_slots], int32. Number of tokens in each row of `token_ids`.
        draft_token_ids: [num_slots, k], int32. Drafts after those tokens; -1: no draft.
    """

    slots: Tensor
    token_ids: Tensor
    lens: Tensor
    draft_token_ids: Tensor
