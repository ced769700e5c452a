# SPDX-License-Identifier: Apache-2.0
"""Infilling (fill-in-the-middle) for models that have special tokens for it."""

from specops.api.tokenizer import Tokenizer

# Special tokens before the prompt, before the suffix and after the suffix, of several model
# families.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)


def infill_prompt(tokenizer: Tokenizer, prompt: object, suffix: str) -> str:
    """Return the text that prompts the model for the part between a prompt and a suffix.

    Args:
        tokenizer: the model's tokenizer.
        prompt: text before the completion.
        suffix: text after the completion.

    Raises:
        ValueError: the prompt is no text, or the model has no tokens for infilling.
    """
    if not isinstance(prompt, str):
        raise ValueError("suffix requires prompt to be one string")
    for before, between, after in _MARKS:
        marks = (before, between, after)
        if all(len(tokenizer.encode(mark, add_special_tokens=False)) == 1 for mark in marks):
            return f"{before}{prompt}{between}{suffix}{after}"
    raise ValueError(
        f"suffix is not supported: the model lacks tokens such as {', '.join(_MARKS[0])}"
    )
