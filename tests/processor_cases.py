# SPDX-License-Identifier: Apache-2.0
"""Logits processors for tests: tables in which every rule applies to some row."""

import torch
from specops.sampling import LogitsProcessors
from torch import Tensor

# Names of the rules that a request can set, with their fields.
RULES = {
    "mask": ("allowed_token_mask", "mask_indices"),
    "bad_words": ("bad_words", "token_ids"),
    "min_tokens": ("min_tokens", "prompt_lens", "stop_token_ids"),
    "bias": ("logit_bias_token_ids", "logit_bias"),
    "repetition": ("repetition_penalty",),
    "presence": ("presence_penalty",),
    "frequency": ("frequency_penalty",),
}
COUNTS = ("counted_token_ids", "token_counts")  # required by the penalties


def only(processors: LogitsProcessors, rules: set[str]) -> LogitsProcessors:
    """Return the processors with only the named rules."""
    fields = {field for rule in rules for field in RULES[rule]}
    if rules & {"repetition", "presence", "frequency"}:
        fields |= set(COUNTS)
    if rules - {"mask"}:
        fields.add("slots")
    return LogitsProcessors(**{name: getattr(processors, name) for name in fields})


def padded(ids: list[int], width: int) -> list[int]:
    return ids + [-1] * (width - len(ids))


def random_processors(
    batch: int, rows: int, vocab: int, positions: Tensor, drafts: Tensor | None = None
) -> LogitsProcessors:
    """Return all rules at once; one request in four has no slot, one row in three no mask.

    Slots are shuffled, tables are wider than their contents, and unused entries are out of range.
    """

    def pick(values: list[float]) -> Tensor:
        return torch.tensor([values[int(i)] for i in torch.randint(len(values), (num_slots,))])

    num_slots, longest = batch + 2, int(positions.max()) if batch else 0
    slots = torch.randperm(num_slots)[:batch].int()
    slots[3::4] = -1
    history = torch.full((num_slots, longest + 3), 2**30, dtype=torch.int32)
    prompt_lens = torch.full((num_slots,), 1, dtype=torch.int32)
    common = min(vocab, 12)  # the first tokens occur more than once
    num_words, word_len = 6, 4
    width = min(vocab, common + 2) + 1
    counted = torch.full((num_slots, width), -1, dtype=torch.int32)
    counts = torch.full((num_slots, width), 2**30, dtype=torch.int32)
    biased = torch.full((num_slots, 9), -1, dtype=torch.int32)
    bad_words = torch.full((num_slots, num_words, word_len), -1, dtype=torch.int32)
    stop = torch.full((num_slots, 4), -1, dtype=torch.int32)
    for b, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        length = int(positions[b])
        tokens = torch.randint(common, (length,), dtype=torch.int32)
        history[slot, :length] = tokens
        prompt_lens[slot] = length // 2
        ids, where = tokens.unique(return_inverse=True)
        in_prompt = torch.zeros(len(ids), dtype=torch.int32)
        in_prompt[where[: length // 2]] = 1
        in_output = torch.bincount(where[length // 2 :], minlength=len(ids)).int()
        counted[slot, : len(ids)] = ids
        counts[slot, : len(ids)] = 2 * in_output + in_prompt
        ids = torch.randperm(vocab)[: min(vocab, int(torch.randint(9, ())))].sort().values.int()
        biased[slot, : len(ids)] = ids
        ids = torch.randperm(vocab)[: min(vocab, int(torch.randint(4, ())))].int()
        stop[slot, : len(ids)] = ids
        tail = tokens.tolist()
        if drafts is not None and drafts.shape[1]:
            tail += [t for t in drafts[b, :1].tolist() if t >= 0]
        for word in range(num_words - 1):
            before = int(torch.randint(word_len, ()))
            matching = tail[len(tail) - before :] if before <= len(tail) else [0] * before
            last = int(torch.randint(vocab, ()))
            bad_words[slot, word] = torch.tensor(padded([*matching, last], word_len))
    words = (vocab + 31) // 32
    # Bits past the vocabulary have no meaning, so they are random.
    mask = torch.randint(-(2**31), 2**31 - 1, (3, words), dtype=torch.int32)
    mask[1] |= torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32)
    mask_indices = torch.randint(3, (rows,), dtype=torch.int32)
    mask_indices[::3] = -1
    return LogitsProcessors(
        slots=slots,
        token_ids=history,
        prompt_lens=prompt_lens,
        counted_token_ids=counted,
        token_counts=counts,
        repetition_penalty=pick([1.0, 1.3, 0.7]),
        presence_penalty=pick([0.0, 0.6, -0.4]),
        frequency_penalty=pick([0.0, 0.3, -0.2]),
        logit_bias_token_ids=biased,
        logit_bias=3 * torch.randn(num_slots, 9),
        bad_words=bad_words,
        stop_token_ids=stop,
        min_tokens=torch.randint(0, longest + 3, (num_slots,), dtype=torch.int32),
        allowed_token_mask=mask,
        mask_indices=mask_indices,
    )


def to_device(processors: LogitsProcessors, device: str | torch.device) -> LogitsProcessors:
    return LogitsProcessors(*(x if x is None else x.to(device) for x in processors))
