# SPDX-License-Identifier: Apache-2.0
"""Sampling, verification and commit of tokens in plain PyTorch."""

import bisect
import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from specops.argument_groups import (
    DraftProbs,
    Drafts,
    EmittedTokens,
    EndingRules,
    LogitsProcessors,
    RequestStatus,
    SampleOutputs,
    SamplingTensors,
    TokenCounts,
    TopLogprobsOutputs,
    VerifyOutputs,
)
from specops.reference.distribution import (
    _FILTERS,
    ACCEPT,
    RESIDUAL,
    TARGET,
    Uniform,
    _clean_logits,
    _draw,
    _filters_of,
    _log_probs,
    _log_softmax,
    _of,
    _rank,
    philox_uniform,
    process_logits,
    target_probs,
)


def sample(
    logits: Tensor,
    positions: Tensor,
    *,
    sampling: SamplingTensors | None = None,
    processors: LogitsProcessors | None = None,
    purpose: int = TARGET,
    anchors: Tensor | None = None,
    processed_logprobs: bool = False,
    outputs: SampleOutputs | None = None,
    uniform: Uniform = philox_uniform,
) -> Tensor:
    """Sample a token per row in float64: filter, then invert the CDF with the row's uniform.

    The CDF runs in token-id order. The tensors of `outputs` are written, except the token ids.
    """
    sampling, outputs = sampling or SamplingTensors(), outputs or SampleOutputs()
    out = torch.zeros(logits.shape[0], dtype=torch.int32)
    for i, row in enumerate(process_logits(logits, processors, positions)):
        filters = _filters_of(sampling, i)
        distribution = target_probs(row, **filters)
        seed, choice = _of(sampling.seeds, i), _of(sampling.choice_index, i)
        anchor = _of(anchors, i)
        out[i] = _draw(distribution, uniform(seed, int(positions[i]), purpose, choice, 0, anchor))
        shown = row if processed_logprobs else logits[i]
        if outputs.probs is not None:
            outputs.probs[i] = distribution
        if outputs.logprobs is not None:
            scores = _log_probs(row, filters) if processed_logprobs else _log_softmax(shown)
            outputs.logprobs[i] = scores[out[i]]
        if outputs.ranks is not None:
            outputs.ranks[i] = _rank(shown, int(out[i]))
    return out


GREEDY, TARGET_MATCH, REJECTION, BLOCK, TOPP = range(5)  # strategies
NORMAL, ACCEPT_ALL, REJECT_ALL, SYNTHETIC = range(4)  # policies


def _residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return normalize(max(target - draft, 0)), or the target if rounding leaves only zeros."""
    rest = (target - draft).clamp(min=0)
    return target if rest.sum() == 0 else rest / rest.sum()


def _rejection_choice(
    target: Tensor,
    children: list[int],
    draft: Tensor | None,
    coin: Callable[..., float],
) -> int:
    """Return the first accepted child, or a token sampled from the residual.

    The children were sampled from `draft`; if it is None, each child had probability 1.
    coin(purpose, sub_index) returns a uniform random number of the row.
    """
    for i, token_id in enumerate(children):
        given = torch.zeros_like(target) if draft is None else draft
        if draft is None:
            given[token_id] = 1
        if coin(ACCEPT, i) * given[token_id] < target[token_id]:
            return token_id
        target = _residual(target, given)
    return _draw(target, coin(RESIDUAL))


def _block_choices(
    targets: list[Tensor],
    drafts: list[int],
    given: list[Tensor],
    coin: Callable[[int, int], float],
) -> list[int]:
    """Return the tokens that block verification emits: the accepted drafts and one more token.

    coin(purpose, row) returns a uniform random number that no other step uses.
    """
    n = len(drafts)
    weights, accepted = [1.0], 0
    for i, token_id in enumerate(drafts):
        t, q = float(targets[i][token_id]), float(given[i][token_id])
        weights.append(min(weights[i] * t / q, 1.0) if q > 0 else float(weights[i] * t > 0))
    for i in range(1, n + 1):
        bar = weights[i]
        if i < n:
            left = float((weights[i] * targets[i] - given[i]).clamp(min=0).sum())
            bar = left / (left + 1 - weights[i]) if left + 1 - weights[i] > 0 else 1.0
        if coin(ACCEPT, i - 1) < bar:
            accepted = i
    if accepted == n:
        return [*drafts, _draw(targets[n], coin(TARGET, n))]
    rest = (weights[accepted] * targets[accepted] - given[accepted]).clamp(min=0)
    rest = rest if rest.sum() > 0 else targets[accepted]
    return [*drafts[:accepted], _draw(rest, coin(RESIDUAL, accepted))]


def verify(
    logits: Tensor,
    drafts: Drafts,
    positions: Tensor,
    *,
    strategy: Tensor | int | None = None,
    policy: Tensor | int | None = None,
    accept_rates: Tensor | None = None,
    sampling: SamplingTensors | None = None,
    processors: LogitsProcessors | None = None,
    draft_probs: DraftProbs | None = None,
    processed_logprobs: bool = False,
    outputs: VerifyOutputs | None = None,
    uniform: Uniform = philox_uniform,
) -> tuple[Tensor, Tensor]:
    """Verify the drafts of each request by a walk through its tree; return tokens and counts.

    The walk starts at the root. It chooses a token for the current row, moves to the first child
    with that token, and ends if no child has it. Without `parents`, the drafts are a chain.
    The tensors of `outputs` are written, except the two that are returned. Tokens are
    [batch, k + 1], padded with -1; counts are the numbers of accepted drafts [batch]; both int32.
    """
    sampling, outputs = sampling or SamplingTensors(), outputs or VerifyOutputs()
    logprobs, ranks, accepted_nodes = outputs.logprobs, outputs.ranks, outputs.accepted_nodes
    batch, k = drafts.token_ids.shape
    output_token_ids = torch.full((batch, k + 1), -1, dtype=torch.int32)
    num_accepted_tokens = torch.zeros(batch, dtype=torch.int32)
    for extra, nothing in ((logprobs, 0), (ranks, 0), (accepted_nodes, -1)):
        if extra is not None:
            extra.fill_(nothing)
    processed = process_logits(logits, processors, positions, drafts)
    for b, (begin, end) in enumerate(itertools.pairwise(drafts.output_indptr.tolist())):
        if begin == end:
            continue
        rule = int(_of(strategy, b, TARGET_MATCH))
        filters = dict(_FILTERS) if rule == GREEDY else _filters_of(sampling, b)
        given: list[Tensor | None] = [None] * k
        source = -1 if draft_probs is None else int(_of(draft_probs.rows, b, b))
        if draft_probs is not None and source >= 0:
            probs, ids = draft_probs.probs[source], draft_probs.token_ids
            for r in range(min(end - begin - 1, len(probs))):
                sparse = None if ids is None else ids[source, r]
                given[r] = _draft_distribution(probs[r], sparse, logits.shape[1])
        walk = _walk(
            [target_probs(row, **filters) for row in processed[begin:end]],
            drafts.token_ids[b, : end - begin - 1].tolist(),
            list(range(-1, k - 1)) if drafts.parents is None else drafts.parents[b].tolist(),
            given,
            rule,
            int(_of(policy, b, NORMAL)),
            [1.0] * k if accept_rates is None else accept_rates[b].tolist(),
            int(positions[b]),
            functools.partial(
                _keyed, uniform, _of(sampling.seeds, b), _of(sampling.choice_index, b)
            ),
        )
        num_accepted_tokens[b] = len(walk) - 1
        row = 0
        for depth, (choice, node) in enumerate(walk):
            output_token_ids[b, depth] = choice
            shown = (processed if processed_logprobs else logits)[begin + row]
            if logprobs is not None:
                scores = _log_probs(shown, filters) if processed_logprobs else _log_softmax(shown)
                logprobs[b, depth] = scores[choice]
            if ranks is not None:
                ranks[b, depth] = _rank(shown, choice)
            if accepted_nodes is not None and node >= 0:
                accepted_nodes[b, depth] = node
            row = node + 1
    return output_token_ids, num_accepted_tokens


def _draft_distribution(probs: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return the dense draft distribution in float64, clamped to [0, 1]; NaN becomes 0."""
    probs = probs.double().nan_to_num(nan=0.0).clamp(0, 1)
    if token_ids is None:
        return probs
    dense = torch.zeros(vocab_size, dtype=torch.float64)
    dense[token_ids[token_ids >= 0].long()] = probs[token_ids >= 0]
    return dense


def _keyed(
    uniform: Uniform,
    seed: int,
    choice_index: int,
    purpose: int,
    position: int,
    sub_index: int = 0,
    anchor: int = 0,
) -> float:
    """Return a uniform random number of a request; `partial` binds the seed and choice index."""
    return uniform(seed, position, purpose, choice_index, sub_index, anchor)


def _walk(
    targets: list[Tensor],
    tokens: list[int],
    parents: list[int],
    given: list[Tensor | None],
    rule: int,
    policy: int,
    accept_rates: list[float],
    start: int,
    coin: Callable[..., float],
) -> list[tuple[int, int]]:
    """Return the emitted tokens of a request as (token, node); the last token has node -1.

    Row 0 is the root, and row r > 0 is node r - 1. targets[r] is the distribution of row r, and
    given[r] the draft distribution of row r's children (None: one-hot at each child).
    """
    # Map drafts past the vocabulary to an extra token of probability 0.
    vocab_size = len(targets[0])
    tokens = [min(token_id, vocab_size) for token_id in tokens]
    targets = [torch.nn.functional.pad(target, (0, 1)) for target in targets]
    given = [None if q is None else torch.nn.functional.pad(q, (0, 1)) for q in given]
    # children[r]: the drafts after row r that can be accepted; not a -1 and its later siblings.
    children: list[list[int]] = [[] for _ in targets]
    for r in range(len(targets)):
        for node, token_id in enumerate(tokens):
            if parents[node] + 1 == r:
                if token_id < 0:
                    break
                children[r].append(node)
    block: list[int] = []
    if rule == BLOCK and policy == NORMAL and children[0]:
        n = [*tokens, -1].index(-1)
        chosen = torch.nn.functional.one_hot(torch.tensor(tokens[:n]), len(targets[0])).double()
        block = _block_choices(
            targets,
            tokens[:n],
            [one if q is None else q for one, q in zip(chosen, given, strict=False)],
            lambda purpose, i: coin(purpose, start + i, 0, start + 1),
        )
    emitted: list[tuple[int, int]] = []
    row = 0
    while True:
        depth = len(emitted)
        drafts = [tokens[node] for node in children[row]]
        target = targets[row]
        if policy != NORMAL:
            rate = {ACCEPT_ALL: 1.0, REJECT_ALL: 0.0}.get(policy, [*accept_rates, 0.0][row])
            may_emit = bool(drafts) and drafts[0] < vocab_size
            if may_emit and coin(ACCEPT, start + depth) < rate:
                choice = drafts[0]
            else:
                drafts, choice = [], _own(target, coin, start + depth)
        elif block:
            choice = block[depth]
            drafts = drafts if depth + 1 < len(block) else []
        elif rule == REJECTION and drafts:
            choice = _rejection_choice(
                target, drafts, given[row], functools.partial(_at, coin, start + depth)
            )
        elif rule == TOPP and drafts and target[drafts[0]] > 0:
            choice = drafts[0]
        else:
            choice = _own(target, coin, start + depth)
        if choice not in drafts:
            return [*emitted, (choice, -1)]
        node = children[row][drafts.index(choice)]
        emitted.append((choice, node))
        row = node + 1


def _at(coin: Callable[..., float], position: int, purpose: int, sub_index: int = 0) -> float:
    return coin(purpose, position, sub_index)


def _own(target: Tensor, coin: Callable[..., float], position: int) -> int:
    """Return the token that `sample` chooses for the row."""
    return _draw(target, coin(TARGET, position))


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first n tokens by (logit descending, id ascending), their log-softmax and the LSE.

    With processed_logprobs, order by processed logits, and take the log of the distribution that
    `sample` samples; a token that the filters drop keeps its place in the order. The LSE, and all
    results of rows that belong to no request, come from the unprocessed logits.
    """
    sampling = sampling or SamplingTensors()
    ranks = None if outputs is None else outputs.ranks
    rows = logits
    if processed_logprobs and processors is not None:
        assert positions is not None
        rows = process_logits(logits, processors, positions, drafts)
    token_ids = torch.sort(_clean_logits(rows), dim=-1, descending=True, stable=True).indices[:, :n]
    logprobs = torch.zeros(token_ids.shape)
    bounds = range(len(logits) + 1) if drafts is None else drafts.output_indptr.tolist()
    for i, row in enumerate(rows):
        b = bisect.bisect_right(bounds, i) - 1
        filters = _filters_of(sampling, b) if b < len(bounds) - 1 else dict(_FILTERS)
        scores = _log_probs(row, filters) if processed_logprobs else _log_softmax(row)
        logprobs[i] = scores[token_ids[i]]
        if ranks is not None:
            ranks[i] = torch.tensor([_rank(row, token_id) for token_id in token_ids[i].tolist()])
    return token_ids.int(), logprobs, torch.logsumexp(_clean_logits(logits), dim=-1).float()


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
) -> dict[str, Tensor]:
    """Commit tokens one at a time; return all tensors by name, as the op would leave them.

    The emitted token ids are returned as "output_token_ids".
    """
    given = {
        "output_token_ids": emitted.token_ids,
        "logprobs": emitted.logprobs,
        "ranks": emitted.ranks,
        "slots": slots,
        "token_ids": token_ids,
        "lens": lens,
        "prompt_lens": prompt_lens,
        "num_committed_tokens": num_committed_tokens,
    }
    for group in (rules, counts, status):
        given |= {} if group is None else group._asdict()
    after = {name: tensor.clone() for name, tensor in given.items() if tensor is not None}

    def of_slot(name: str, slot: int, absent: int) -> int:
        return int(after[name][slot]) if name in after else absent

    def ids_of(name: str, slot: int) -> list[int]:
        return _before_padding(after[name][slot].tolist()) if name in after else []

    for b, s in enumerate(slots.tolist()):
        tokens: list[int] = []  # committed
        if s >= 0 and of_slot("finish_reasons", s, 0) == 0:
            reason, index, is_injected = 0, -1, False
            row = token_ids[s, : int(lens[s])].tolist()
            prompt_len = of_slot("prompt_lens", s, 0)
            stops, inject = ids_of("stop_token_ids", s), ids_of("inject_token_ids", s)
            state = of_slot("thinking_state", s, -1)
            for token in _before_padding(emitted.token_ids[b].tolist()):
                n = len(row) + 1 - prompt_len
                may_stop = n >= of_slot("min_tokens", s, 0)
                if state == 0 and token == of_slot("think_end_token_id", s, -1):
                    state = len(inject) + 1
                else:
                    budget = of_slot("thinking_budget", s, -1)
                    if state == 0 and 0 <= budget < n:
                        state = 1
                    if state == 0 and inject and may_stop and token in stops:
                        state = 1
                    if 1 <= state <= len(inject):
                        token, is_injected = inject[state - 1], True
                    if state >= 1:
                        state += 1
                row.append(token)
                tokens.append(token)
                output = row[prompt_len:]
                matches = [
                    i
                    for i, padded in enumerate(
                        after["stop_sequences"][s].tolist() if "stop_sequences" in after else []
                    )
                    if (sequence := _before_padding(padded))
                    and output[-len(sequence) :] == sequence
                ]
                limit, reply = of_slot("max_lens", s, -1), of_slot("reply_budget", s, -1)
                if may_stop and token in stops:
                    reason, index = 1, stops.index(token)
                elif may_stop and matches:
                    reason, index = 2, matches[0]
                elif 0 <= limit <= len(row) or (reply >= 0 and state > len(inject) + reply):
                    reason = 3
                if reason or is_injected:
                    break
            after["token_ids"][s, : len(row)] = torch.tensor(row, dtype=torch.int32)
            after["lens"][s] = len(row)
            if is_injected:
                for name, value in (("logprobs", 0), ("ranks", 1)):
                    if name in after:
                        after[name][b, len(tokens) - 1] = value
            for name, value in (
                ("thinking_state", state),
                ("finish_reasons", reason),
                ("stop_indices", index),
            ):
                if name in after:
                    after[name][s] = value
            if "token_counts" in after:
                table = dict(
                    zip(
                        ids_of("counted_token_ids", s),
                        after["token_counts"][s].tolist(),
                        strict=False,
                    )
                )
                for token in tokens:
                    table[token] = table.get(token, 0) + 2
                places = torch.arange(len(table))
                after["counted_token_ids"][s, places] = torch.tensor(
                    sorted(table), dtype=torch.int32
                )
                after["token_counts"][s, places] = torch.tensor(
                    [table[token] for token in sorted(table)], dtype=torch.int32
                )
        if s >= 0:
            after["output_token_ids"][b, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            for name, value in (("output_token_ids", -1), ("logprobs", 0), ("ranks", 0)):
                if name in after:
                    after[name][b, len(tokens) :] = value
        if "num_committed_tokens" in after:
            after["num_committed_tokens"][b] = len(tokens)
    return after


def _before_padding(ids: list[int]) -> list[int]:
    """Return the ids before the first -1."""
    return ids[: ids.index(-1)] if -1 in ids else ids
