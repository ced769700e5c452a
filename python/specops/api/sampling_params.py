# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of a request, validated once on construction."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from specops.api.structured import StructuredOutput

_Sequences = tuple[tuple[int, ...], ...]
_MAX_INT = 2**31 - 1

# Ranges of the integer parameters; some of them may also be None.
WHOLE_RANGES: dict[str, tuple[int, int | None]] = {
    "max_tokens": (0, 2**63 - 1),
    "top_k": (0, _MAX_INT),
    "n": (1, 128),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, 100),
    "prompt_logprobs": (0, 100),
    "prompt_logprobs_start": (0, _MAX_INT),
    "min_tokens": (0, _MAX_INT),
    "think_end_token_id": (0, _MAX_INT),
    "reasoning_max_tokens": (0, _MAX_INT),
    "response_max_tokens": (1, _MAX_INT),
}
REAL_RANGES = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 1e6),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
POSITIVE = ("top_p", "typical_p", "repetition_penalty")  # parameters that exclude 0
MAX_BIAS = 100.0  # largest magnitude

# Device tables have a row of maximum size for each slot, so sizes need a limit.
MAX_BIASES = 4096
MAX_SEQUENCES = 256
MAX_SEQUENCE_LENGTH = 64


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    They change the logits in this order: allowed tokens, bad words, min_tokens, logit_bias,
    penalties. Then temperature, top_k, top_p, min_p and typical_p select among the tokens left.

    Attributes:
        max_tokens: maximum number of tokens to generate. None means up to the context length; with
            0 the prompt is computed and nothing generated.
        temperature: in [0, 1e6]. 0 is greedy decoding; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all, and so does -1 over HTTP.
        top_p: keep the smallest set of tokens whose mass reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
        typical_p: keep the tokens with surprise nearest to the entropy, up to this mass, in (0, 1].
        repetition_penalty: in (0, 1e6]. Logits of tokens that already occur in the prompt or the
            output are divided by it if they are positive, else multiplied by it.
        presence_penalty: subtracted once from the logits of tokens in the output, in [-2, 2].
        frequency_penalty: subtracted for each occurrence of a token in the output, in [-2, 2].
        logit_bias: by token id, the number added to its logit, in [-100, 100].
        bad_words: texts that are not generated in the tokenizer's own spelling, inside a text and
            after a space. As in vLLM, other token sequences that spell the same text are possible.
        bad_words_token_ids: sequences of token ids that are not generated.
        allowed_token_ids: the only tokens to choose from; None for all. If this, bad words and
            min_tokens exclude every token, token 0 is chosen with logprob -inf.
        min_tokens: number of tokens to generate before stop tokens, stop strings and stop sequences
            take effect; stop tokens are not chosen before that.
        seed: 64-bit seed of the request's random numbers. None draws one, which the output reports.
        n: number of independent choices for the prompt, 1 to 128.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end the output; they are not part of the text.
        stop_token_sequences: sequences of token ids that end the output; they are part of the text.
        ignore_eos: continue past the model's end-of-sequence tokens.
        logprobs: None for none; otherwise the number of alternatives reported with each emitted
            token, 0 to 100.
        report_drafts: report with each step's output which drafts the step verified.
        prompt_logprobs: the same as logprobs for the tokens of the prompt. All rows of the prompt
            are then computed; none are taken from the prefix cache.
        prompt_logprobs_start: index of the first token of the prompt whose logprob is reported.
            Rows of earlier tokens may then be taken from the prefix cache.
        think_end_token_id: the token that ends the model's thinking; "</think>" when absent.
        reasoning_max_tokens: number of thinking tokens after which the thinking is ended by force,
            0 or more.
        response_max_tokens: maximum number of tokens to generate after the thinking, 1 or more.
        think_inject_token_ids: tokens that end the thinking by force; think_end_token_id when
            absent. They also replace an end of sequence inside the thinking.
        structured_output: constraint on the output: only tokens with which it can still be met are
            chosen. If the length of the thinking or of the reply is limited, it constrains the
            reply. A text that cannot be extended ends with finish_reason "stop", even before
            min_tokens. A stop token that is text may end an incomplete text, and is then the
            stop_reason; a complete text has no stop_reason. If this and the other parameters
            exclude every token, the output ends: with "stop" if it is complete, else with "abort"
            and the stop_reason "structured_output". If llguidance reaches a limit, the output ends
            with "abort" and a stop_reason that names the limit.
        prediction: a text, or token ids, that the output may follow in part. Drafts are taken from
            it; it changes no token.
        cache_salt: requests share pages of the prefix cache, and earlier responses to draft from,
            only with requests of the same salt; None: only with requests without a salt. It changes
            no token.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: _Sequences = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_token_sequences: _Sequences = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    report_drafts: bool = False
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    think_end_token_id: int | None = None
    reasoning_max_tokens: int | None = None
    response_max_tokens: int | None = None
    think_inject_token_ids: tuple[int, ...] | None = None
    structured_output: StructuredOutput | None = None
    prediction: str | tuple[int, ...] = ()
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
            self._become_tuple(name, "strings")
        self._become_tuple("stop_token_ids", "integers")
        for name in ("allowed_token_ids", "think_inject_token_ids"):
            if getattr(self, name) is not None:
                self._become_tuple(name, "integers")
        for name in ("bad_words_token_ids", "stop_token_sequences"):
            self._become_sequences(name)
        if not isinstance(self.prediction, str):
            self._become_tuple("prediction", "integers, or a text")
        for name in ("ignore_eos", "report_drafts"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, (low, high) in WHOLE_RANGES.items():
            value = getattr(self, name)
            # None is valid for max_tokens, and for parameters whose default is None.
            if value is None and (defaults[name] is None or name == "max_tokens"):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, got {value!r}")
            if value < low or (high is not None and value > high):
                upper = "" if high is None else f" and at most {high}"
                raise ValueError(f"{name} must be at least {low}{upper}, got {value}")
        for name, (lowest, highest) in REAL_RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name} must be a number, got {value!r}")
            if not lowest <= value <= highest:
                raise ValueError(f"{name} must be in [{lowest:g}, {highest:g}], got {value!r}")
        self._check_values()

    def _check_values(self) -> None:
        """Check all constraints other than simple ranges."""
        if self.top_p == 0.0:
            raise ValueError("top_p must be above 0, got 0; use temperature 0 for greedy decoding")
        for name in POSITIVE:
            value = getattr(self, name)
            if name != "top_p" and np.float32(value) == 0.0:  # the ops round to float32
                raise ValueError(f"{name} must be above 0, got {value!r}; use 1 to disable it")
        for name in ("stop", "bad_words"):
            if any(not isinstance(text, str) or not text for text in getattr(self, name)):
                raise ValueError(f"{name} must hold non-empty strings, got {getattr(self, name)!r}")
            for text in getattr(self, name):
                if any("\ud800" <= letter <= "\udfff" for letter in text):
                    raise ValueError(
                        f"{name} must hold valid Unicode, got a lone surrogate in {text!r}"
                    )
        for name in ("stop_token_ids", "allowed_token_ids", "think_inject_token_ids"):
            _check_token_ids(name, getattr(self, name) or ())
        if not isinstance(self.prediction, str):
            _check_token_ids("prediction", self.prediction)
        for name in ("bad_words_token_ids", "stop_token_sequences"):
            for sequence in getattr(self, name):
                _check_token_ids(name, sequence)
            check_sequences(name, getattr(self, name))
        if len(self.bad_words) > MAX_SEQUENCES:  # checked first, since tokenizing takes long
            raise ValueError(
                f"bad_words must hold at most {MAX_SEQUENCES} strings, got {len(self.bad_words)}"
            )
        if len(self.think_inject_token_ids or ()) > MAX_SEQUENCE_LENGTH:
            raise ValueError(
                f"think_inject_token_ids must hold at most {MAX_SEQUENCE_LENGTH} token ids, got "
                f"{len(self.think_inject_token_ids or ())}"
            )
        check_cache_salt(self.cache_salt)
        if self.structured_output is not None:
            self._check_structured_output()
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids must hold at least one token id, got none")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise ValueError(
                f"prompt_logprobs_start needs prompt_logprobs, got {self.prompt_logprobs_start} "
                "without it"
            )
        thinks = self.reasoning_max_tokens is not None or self.response_max_tokens is not None
        for name in ("think_end_token_id", "think_inject_token_ids"):
            if getattr(self, name) is not None and not thinks:
                raise ValueError(
                    f"{name} needs reasoning_max_tokens or response_max_tokens, got neither"
                )
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    def _check_structured_output(self) -> None:
        structured: Any = self.structured_output
        if not isinstance(structured, StructuredOutput):
            raise ValueError(f"structured_output must be a StructuredOutput, got {structured!r}")
        # Without an injected token the thinking could end at an unconstrained token.
        if self.think_inject_token_ids == () and self.reasoning_max_tokens is not None:
            raise ValueError(
                "think_inject_token_ids must hold a token if structured_output and "
                "reasoning_max_tokens are set, got none"
            )

    def _become_tuple(self, name: str, what: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise ValueError(f"{name} must be a list of {what}, got {value!r}")
        object.__setattr__(self, name, tuple(value))

    def _become_sequences(self, name: str) -> None:
        self._become_tuple(name, "lists of integers")
        value = getattr(self, name)
        for sequence in value:
            if not isinstance(sequence, (list, tuple)):
                raise ValueError(f"{name} must be a list of lists of integers, got {value!r}")
        object.__setattr__(self, name, tuple(map(tuple, value)))

    def for_prompt(self) -> "SamplingParams":
        """Return the parameters with which a prefill engine computes the prompt and one token.

        Another engine generates the output, so limits and constraints of the output are removed.
        All other parameters stay, since they select the drafters whose pages the other engine
        fetches.
        """
        return replace(
            self,
            max_tokens=1,
            min_tokens=min(self.min_tokens, 1),
            n=1,
            stop=(),
            logprobs=None,
            report_drafts=False,
            structured_output=None,
        )

    def for_scores(self, start: int, num_alternatives: int) -> "SamplingParams":
        """Return the parameters of a request that only reports logprobs of its prompt.

        Args:
            start: index of the first token that has a logprob.
            num_alternatives: number of alternatives reported with each.
        """
        return replace(
            self.for_prompt(),
            max_tokens=0,
            min_tokens=0,
            prediction=(),
            prompt_logprobs=num_alternatives,
            prompt_logprobs_start=start,
        )

    @property
    def has_penalties(self) -> bool:
        """True if a token's logit depends on earlier tokens through a penalty."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def thinks(self) -> bool:
        """True if the length of the thinking, or of the reply after it, is limited."""
        return self.reasoning_max_tokens is not None or self.response_max_tokens is not None

    def largest_token_id(self) -> tuple[str, int]:
        """Return the field with the largest token id, and that id; -1 if there is none."""
        named: dict[str, Iterable[int]] = {
            "logit_bias": (token_id for token_id, _ in self.bias()),
            "bad_words_token_ids": _flat(self.bad_words_token_ids),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
            "prediction": () if isinstance(self.prediction, str) else self.prediction,
            "stop_token_sequences": _flat(self.stop_token_sequences),
            "think_inject_token_ids": self.think_inject_token_ids or (),
            "think_end_token_id": ()
            if self.think_end_token_id is None
            else (self.think_end_token_id,),
        }
        return max(
            ((name, max(ids, default=-1)) for name, ids in named.items()), key=lambda one: one[1]
        )

    def bias(self) -> tuple[tuple[int, float], ...]:
        """Return `logit_bias` as (token id, bias) pairs, by ascending token id."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias


def _flat(sequences: _Sequences) -> Iterable[int]:
    return (token_id for sequence in sequences for token_id in sequence)


def check_cache_salt(salt: Any) -> None:
    """Check that a salt is None or a non-empty text.

    Raises:
        ValueError: it is something else.
    """
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise ValueError(f"cache_salt must be a non-empty string, got {salt!r}")
    if any("\ud800" <= letter <= "\udfff" for letter in salt):
        raise ValueError("cache_salt must be valid Unicode, got a lone surrogate")


def _check_token_ids(name: str, token_ids: Iterable[Any]) -> None:
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValueError(f"{name} must hold integers, got {token_id!r}")
        if not 0 <= token_id <= _MAX_INT:
            raise ValueError(f"{name} must hold token ids from 0 to {_MAX_INT}, got {token_id}")


def check_sequences(name: str, sequences: _Sequences) -> None:
    """Check the number and the lengths of the token sequences of a parameter.

    Raises:
        ValueError: there are too many, or one is empty or too long; the message names `name`.
    """
    if len(sequences) > MAX_SEQUENCES:
        raise ValueError(
            f"{name} must hold at most {MAX_SEQUENCES} sequences of tokens, got {len(sequences)}"
        )
    for sequence in sequences:
        if not 1 <= len(sequence) <= MAX_SEQUENCE_LENGTH:
            raise ValueError(
                f"{name} must hold sequences of 1 to {MAX_SEQUENCE_LENGTH} tokens, got one of "
                f"{len(sequence)}"
            )


def _bias(biases: Any) -> tuple[tuple[int, float], ...]:
    """Check logit biases and return them by ascending token id."""
    if isinstance(biases, Mapping):
        biases = tuple(biases.items())
    is_pairs = isinstance(biases, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in biases
    )
    if not is_pairs:
        raise ValueError(f"logit_bias must be an object of numbers by token id, got {biases!r}")
    if len(biases) > MAX_BIASES:
        raise ValueError(f"logit_bias must hold at most {MAX_BIASES} tokens, got {len(biases)}")
    pairs: dict[int, float] = {}
    for token_id, bias in biases:
        _check_token_ids("logit_bias", [token_id])
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or bias != bias:
            raise ValueError(f"logit_bias must hold numbers, got {bias!r} for token {token_id}")
        if abs(bias) > MAX_BIAS:
            raise ValueError(
                f"logit_bias must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}], got {bias!r} for token "
                f"{token_id}"
            )
        pairs[token_id] = float(bias)
    return tuple(sorted(pairs.items()))
