# SPDX-License-Identifier: Apache-2.0
"""Audit records: an answer with everything that it was computed from, and the verdict on it."""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from specops.api.contract import digest_with_adapter
from specops.api.outputs import Completion, TokenLogprob
from specops.api.sampling_params import SamplingParams
from specops.api.structured import StructuredOutput

# Strategies under which an answer does not depend on the drafts that were verified.
STRATEGIES = ("target_match", "greedy")

# Tokens of an answer that a step verifies, besides the one that it chooses.
NUM_DRAFTS = 63

_MAX_FLOAT = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]  # of float32

# Parameters that change nothing in an answer, with the values that they have in a record.
_LEFT_OUT: dict[str, Any] = {
    "n": 1,
    "report_drafts": False,
    "prompt_logprobs": None,
    "prompt_logprobs_start": 0,
    "prediction": (),
    "cache_salt": None,
}
_DEFAULTS = {
    field.name: field.default
    for field in fields(SamplingParams)
    if field.name not in (*_LEFT_OUT, "seed")
}


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """An answer and everything that it was computed from.

    Attributes:
        prompt_token_ids: the prompt.
        token_ids: the output, or its beginning.
        params: sampling parameters; the seed is the one that was used. Parameters that change
            nothing in an answer get their defaults.
        choice_index: index of the answer among the choices of its request.
        verify_strategy: how drafts were verified, one of STRATEGIES.
        logprobs: one per output token, or empty if the answer reports none.
        finish_reason, stop_reason: end of the answer, as in `Completion`; both None if the record
            is only the beginning of an answer.
        contract: digest of the execution contract of its request; None if unknown.
        adapter: digest of the LoRA adapter; None: the model alone.

    Raises:
        ValueError: a value is invalid.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    params: SamplingParams
    choice_index: int = 0
    verify_strategy: str = "target_match"
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | tuple[int, ...] | None = None
    contract: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_token_ids", "token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        object.__setattr__(self, "params", replace(self.params, **_LEFT_OUT))
        if type(self.choice_index) is not int or not 0 <= self.choice_index < 2**31:
            raise ValueError(f"choice_index must be in [0, 2^31), got {self.choice_index!r}")
        for name in ("finish_reason", "contract"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise ValueError(f"{name} must be a text, got {getattr(self, name)!r}")
        if self.verify_strategy not in STRATEGIES:
            raise ValueError(
                f"verify_strategy must be one of {', '.join(STRATEGIES)}, got "
                f"{self.verify_strategy!r}: under other strategies an answer depends on the drafts "
                "that were verified, so it cannot be audited"
            )
        if self.params.seed is None:
            raise ValueError("seed must be the seed that the answer was computed with, got none")
        if self.logprobs and len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"logprobs must have one entry for each of {len(self.token_ids)} tokens, got "
                f"{len(self.logprobs)}"
            )

    @classmethod
    def of(
        cls,
        completion: Completion,
        params: SamplingParams,
        *,
        verify_strategy: str = "target_match",
        contract: str | None = None,
        adapter: str | None = None,
    ) -> "AuditRecord":
        """Return the record of a completion.

        Args:
            completion: the completion.
            params: the parameters of its request.
            verify_strategy: how its drafts were verified.
            contract: digest of the engine's execution contract.
            adapter: digest of its LoRA adapter, from `Engine.adapters`; None: the model alone.

        Raises:
            ValueError: the strategy is not one of STRATEGIES.
        """
        return cls(
            prompt_token_ids=tuple(completion.prompt_token_ids),
            token_ids=tuple(completion.token_ids),
            params=replace(params, seed=completion.seed),
            choice_index=completion.index,
            verify_strategy=verify_strategy,
            logprobs=tuple(completion.logprobs),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            contract=None if contract is None else digest_with_adapter(contract, adapter),
            adapter=adapter,
        )

    @classmethod
    def from_dict(cls, values: Any) -> "AuditRecord":
        """Return the record that `as_dict` wrote.

        Raises:
            ValueError: `values` is not such an object.
        """
        given = _object("record", values, [field.name for field in fields(cls)] + ["seed"])
        for name in ("prompt_token_ids", "token_ids", "params", "seed"):
            if name not in given:
                raise ValueError(f"record.{name} is missing")
        own = _object("record.params", given["params"], _DEFAULTS)
        structured = own.get("structured_output")
        if structured is not None:
            names = [field.name for field in fields(StructuredOutput)]
            own["structured_output"] = StructuredOutput(
                **_object("record.params.structured_output", structured, names)
            )
        if isinstance(own.get("logit_bias"), list):
            own["logit_bias"] = tuple(
                tuple(pair) if isinstance(pair, list) else pair for pair in own["logit_bias"]
            )
        given["params"] = SamplingParams(**own, seed=given.pop("seed"))
        logprobs = given.get("logprobs", ())
        if not isinstance(logprobs, Sequence) or isinstance(logprobs, str):
            raise ValueError(f"record.logprobs must be a list, got {logprobs!r}")
        given["logprobs"] = tuple(
            _logprob_of(f"record.logprobs[{place}]", one) for place, one in enumerate(logprobs)
        )
        if isinstance(given.get("stop_reason"), list):
            given["stop_reason"] = tuple(given["stop_reason"])
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        """Return the record as JSON values, without fields that have their defaults."""
        params = {
            name: getattr(self.params, name)
            for name, default in _DEFAULTS.items()
            if getattr(self.params, name) != default
        }
        if self.params.structured_output is not None:
            params["structured_output"] = {
                field.name: getattr(self.params.structured_output, field.name)
                for field in fields(StructuredOutput)
                if getattr(self.params.structured_output, field.name) is not None
            }
        found: dict[str, Any] = {
            "prompt_token_ids": list(self.prompt_token_ids),
            "token_ids": list(self.token_ids),
            "seed": self.params.seed,
            "params": params,
        }
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in (*found, "logprobs") and value != field.default:
                found[field.name] = value
        if self.logprobs:
            found["logprobs"] = [_logprob_values(one) for one in self.logprobs]
        return found

    def request(self, cache_salt: str) -> SamplingParams:
        """Return the parameters of the request that derives the answer again.

        Its prediction is the answer itself, so that tens of tokens are verified at once.

        Args:
            cache_salt: a new salt for each audit. Answers to the same prompt in one audit share its
                pages, and nothing is taken from the prefix cache of other requests.
        """
        params = replace(self.params, prediction=self.token_ids, cache_salt=cache_salt)
        if self.finish_reason == "length" and self.params.max_tokens is None:
            # The context ended the answer; that of another engine may be longer.
            count = len(self.token_ids)
            params = replace(params, max_tokens=count, min_tokens=min(params.min_tokens, count))
        if self.logprobs:
            most = max(len(one.alternatives) for one in self.logprobs)
            params = replace(params, logprobs=max(most, params.logprobs or 0))
        return params

    def speculation(self, max_num_drafts: int) -> dict[str, Any]:
        """Return the `speculative_config` of the request that derives the answer again.

        Args:
            max_num_drafts: maximum number of drafts of a request in the engine.
        """
        chosen = {"verify_strategy": self.verify_strategy, "accept_policy": "normal"}
        if not max_num_drafts:
            return {"method": "naive", **chosen}
        return {
            "method": "prediction",
            "num_speculative_tokens": min(NUM_DRAFTS, max_num_drafts),
            "adaptive_verification": False,
            **chosen,
        }


@dataclass(frozen=True)
class AuditVerdict:
    """The result of an audit.

    Attributes:
        num_confirmed: number of leading tokens that were derived again with all their bits.
        what: what differs after them: "token", "logprob", "rank", "alternatives", "ending", or
            "error" if the request failed; None if the whole answer is confirmed.
        given: value in the record.
        derived: value that the engine derived.
        same_contract: whether the record's contract is the engine's; None if the record has none.
    """

    num_confirmed: int
    what: str | None = None
    given: Any = None
    derived: Any = None
    same_contract: bool | None = None

    @property
    def is_confirmed(self) -> bool:
        """True if every token and every bit of the answer was derived again."""
        return self.what is None

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {
            "confirmed": self.is_confirmed,
            "num_confirmed": self.num_confirmed,
            "what": self.what,
            "given": _json_value(self.given),
            "derived": _json_value(self.derived),
            "same_contract": self.same_contract,
        }

    def sentence(self, text_of: Callable[[int], str] = str) -> str:
        """Return the verdict as a sentence.

        Args:
            text_of: function that returns the text of a token id.
        """
        note = "" if self.same_contract is not False else " (under another contract)"
        if self.what is None:
            return f"confirmed: {self.num_confirmed} tokens{note}"
        given, derived = self.given, self.derived
        if self.what == "token":
            given, derived = (
                "no token" if one is None else text_of(one) for one in (given, derived)
            )
        return (
            f"{self.what} differs at output token {self.num_confirmed}{note}: the record has "
            f"{given}, the model gives {derived}"
        )


class Comparison:
    """Comparison of a record with an answer that an engine derives, token by token.

    Args:
        record: the record.
        contract: digest of the engine's execution contract; None: contracts are not compared.

    Attributes:
        verdict: the verdict; None until it is known. Once it is known, the request can be aborted.
    """

    def __init__(self, record: AuditRecord, contract: str | None = None) -> None:
        self.verdict: AuditVerdict | None = None
        self._record, self._count = record, 0
        self._same_contract: bool | None = None
        if contract is not None and record.contract is not None:
            own = digest_with_adapter(contract, record.adapter)
            self._same_contract = own == record.contract
        self._complete_beginning()

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Compare the next tokens; `logprobs` has one entry for each if the record has any."""
        record = self._record
        for place, token_id in enumerate(token_ids):
            if self.verdict is not None:
                return
            if self._count == len(record.token_ids):
                self._decide("token", None, token_id)
            elif token_id != record.token_ids[self._count]:
                self._decide("token", record.token_ids[self._count], token_id)
            elif not record.logprobs or self._has_bits(logprobs[place]):
                self._count += 1
                self._complete_beginning()

    def end(self, finish_reason: str, stop_reason: Any, error: str | None = None) -> None:
        """Compare the end of the answer, after its last token."""
        if self.verdict is not None:
            return
        record = self._record
        if error is not None:
            self._decide("error", "an answer", error)
        elif self._count < len(record.token_ids):
            self._decide("token", record.token_ids[self._count], None)
        elif (finish_reason, stop_reason) != (record.finish_reason, record.stop_reason):
            self._decide(
                "ending",
                (record.finish_reason, record.stop_reason),
                (finish_reason, stop_reason),
            )
        else:
            self._decide()

    def _decide(self, what: str | None = None, given: Any = None, derived: Any = None) -> None:
        self.verdict = AuditVerdict(self._count, what, given, derived, self._same_contract)

    def _complete_beginning(self) -> None:
        """Decide on a record that is only the beginning of an answer, once it is derived."""
        if self._record.finish_reason is None and self._count == len(self._record.token_ids):
            self._decide()

    def _has_bits(self, derived: TokenLogprob) -> bool:
        """Compare a token's logprob with that of the record; decide if they differ."""
        given = self._record.logprobs[self._count]
        alternatives = derived.alternatives[: len(given.alternatives)]
        if _bits(given.logprob) != _bits(derived.logprob):
            self._decide("logprob", given.logprob, derived.logprob)
        elif given.rank and given.rank != derived.rank:
            self._decide("rank", given.rank, derived.rank)
        elif _all_bits(given.alternatives) != _all_bits(alternatives):
            self._decide("alternatives", given.alternatives, alternatives)
        return self.verdict is None


def _bits(value: float) -> bytes:
    return struct.pack("<f", value)


def _all_bits(alternatives: Sequence[tuple[int, float]]) -> list[tuple[int, bytes]]:
    return [(token_id, _bits(logprob)) for token_id, logprob in alternatives]


def _object(name: str, values: Any, known: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} must be an object, got {values!r}")
    for key in values:
        if key not in known:
            raise ValueError(f"{name}.{key} is not known; known are {', '.join(known)}")
    return dict(values)


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple)) or not all(
        type(value) is int and 0 <= value < 2**31 for value in values
    ):
        raise ValueError(f"{name} must be a list of token ids, got {values!r}")
    return tuple(values)


def _logprob_values(one: TokenLogprob) -> dict[str, Any]:
    """Return a logprob as JSON values; None stands for -inf, which JSON does not have."""
    found: dict[str, Any] = {"token_id": one.token_id, "logprob": _json_number(one.logprob)}
    if one.rank:
        found["rank"] = one.rank
    if one.alternatives:
        found["alternatives"] = [
            [token_id, _json_number(logprob)] for token_id, logprob in one.alternatives
        ]
    return found


def _json_number(value: float) -> float | None:
    return None if value == -math.inf else value


def _json_value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_json_value(one) for one in value]
    return _json_number(value) if isinstance(value, float) else value


def _logprob_of(name: str, values: Any) -> TokenLogprob:
    given = _object(name, values, ("token_id", "logprob", "rank", "alternatives"))
    alternatives = given.get("alternatives", ())
    is_pairs = isinstance(alternatives, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in alternatives
    )
    if "logprob" not in given or not is_pairs:
        raise ValueError(
            f"{name} must have a logprob, and alternatives as [token id, logprob], got {values!r}"
        )
    return TokenLogprob(
        _integer(name, given.get("token_id", -1)),
        _number(name, given["logprob"]),
        tuple((_integer(name, token_id), _number(name, one)) for token_id, one in alternatives),
        _integer(name, given.get("rank", 0)),
    )


def _integer(name: str, value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} must hold integers for token_id and rank, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if value is None:
        return -math.inf
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _MAX_FLOAT:  # NaN fails this comparison
        raise ValueError(f"{name} must hold numbers of float32 for logprobs, got {value!r}")
    return float(value)
