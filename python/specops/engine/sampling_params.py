# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of the sampler, validated once when it is made."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        max_tokens: most tokens to generate, at least 1. None means up to the context length.
        temperature: 0 is greedy decoding; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose mass reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest one, in [0, 1].
        seed: 64-bit seed of the request's random numbers. None draws one, which the output reports.
        n: number of independent choices for the prompt.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end the output; they are not part of the text.
        ignore_eos: go on past the model's end-of-sequence tokens.
        logprobs: None for none; otherwise the number of alternatives beside each emitted token.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, what in (("stop", "strings"), ("stop_token_ids", "integers")):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple, set, frozenset)):
                raise ValueError(f"{name} must be a list of {what}, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        whole = {
            "max_tokens": (1, None),
            "top_k": (0, 2**31 - 1),
            "n": (1, 128),
            "seed": (-(2**63), 2**64 - 1),
            "logprobs": (0, 100),
        }
        for name, (low, high) in whole.items():
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "seed", "logprobs"):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, got {value!r}")
            if value < low or (high is not None and value > high):
                upper = "" if high is None else f" and at most {high}"
                raise ValueError(f"{name} must be at least {low}{upper}, got {value}")
        real = {"temperature": (0.0, 1e6), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}
        for name, (lowest, highest) in real.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name} must be a number, got {value!r}")
            if not lowest <= value <= highest:
                raise ValueError(f"{name} must be in [{lowest:g}, {highest:g}], got {value!r}")
        if self.top_p == 0.0:
            raise ValueError("top_p must be above 0, got 0; use temperature 0 for greedy decoding")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"stop must hold non-empty strings, got {self.stop!r}")
        if any(isinstance(i, bool) or not isinstance(i, int) for i in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must hold integers, got {self.stop_token_ids!r}")
