# SPDX-License-Identifier: Apache-2.0
"""Infilling: completion between a prompt and a suffix, for models that have tokens for it."""

from specops.api.tokenizer import Tokenizer

# Marks before the prompt, before the suffix and after it, as several families of models are
# trained.
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
        raise ValueError("suffix needs a prompt that is one text")
    for before, between, behind in _MARKS:
        marks = (before, between, behind)
        if all(len(tokenizer.encode(one, add_special_tokens=False)) == 1 for one in marks):
            return f"{before}{prompt}{between}{suffix}{behind}"
    raise ValueError(
        f"suffix is not supported: the model has no tokens for it, such as {', '.join(_MARKS[0])}"
    )
