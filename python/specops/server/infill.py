# SPDX-License-Identifier: Apache-2.0
"""A completion between two texts: a prompt with a suffix, for models that have tokens for it."""

from specops.tokenizer import Tokenizer

# What stands before the beginning, between it and the end, and behind that, as models are trained.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)


def infill_prompt(tokenizer: Tokenizer, prompt: object, suffix: str) -> str:
    """The one text that asks for what stands between two.

    Args:
        tokenizer: of the model.
        prompt: before what is asked for.
        suffix: behind it.

    Raises:
        ValueError: the prompt is no text, or the model has no tokens for it.
    """
    if not isinstance(prompt, str):
        raise ValueError("suffix needs a prompt that is one text")
    for before, between, behind in _MARKS:
        marks = (before, between, behind)
        if all(len(tokenizer.encode(one, add_special_tokens=False)) == 1 for one in marks):
            return f"{before}{prompt}{between}{suffix}{behind}"
    raise ValueError(
        f"suffix is not supported: the model has no tokens for it, such as {', '.join(_MARKS[0])}"
    )
