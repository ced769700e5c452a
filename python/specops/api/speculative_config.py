# SPDX-License-Identifier: Apache-2.0
"""Speculative configuration of the server, and the fields that a request may change.

The fields here are common to all drafting methods; each method adds its own (`Options` in
api/methods). docs/drafters.md lists all of them. Every invalid configuration raises a ValueError
that says what is valid.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, TypeVar, cast

from specops.api.methods import (
    METHODS,
    NAIVE,
    Method,
    Options,
    canonical_name,
    checks,
    drafting_order,
    method_names,
    method_of,
    methods,
)
from specops.api.speculative_spellings import (
    OTHER_FIELDS,
    all_option_names,
    check_option_names,
    parse_object,
    refuse_unknown,
    translate,
)

VERIFY_STRATEGIES = ("target_match", "greedy", "rejection", "block", "topp")
ACCEPT_POLICIES = ("normal", "accept_all", "reject_all", "synthetic")

# Fields that a request may set, besides those of the methods' own options.
_OF_REQUESTS = (
    "method",
    "num_speculative_tokens",
    "num_model_steps",
    "verify_strategy",
    "accept_policy",
    "synthetic_acceptance_rates",
    "adaptive_verification",
)
_UNSET = cast(int, None)  # placeholder that `__post_init__` replaces by an integer

OwnOptions = TypeVar("OwnOptions", bound=Options)


def _stages(value: object) -> tuple[str, ...]:
    """Return the canonical names of the methods in a `method` field; empty for "naive"."""
    names = method_names()
    parts: list[Any] = [value]
    if isinstance(value, str):
        parts = list(map(canonical_name, value.lower().split("+")))
    if len(parts) == 1:
        checks.choice("method", parts[0], names)
        return () if parts[0] == NAIVE else (parts[0],)
    for part in parts:
        if part not in METHODS:
            raise ValueError(
                f"method must be one of {', '.join(names)}, or several drafting methods joined by "
                f"+; got {part!r} in {value!r}"
            )
    order = drafting_order()
    for before, part in pairwise(parts):
        if not method_of(part).may_follow or order.index(part) <= order.index(before):
            raise ValueError(f"method: {part!r} cannot continue {before!r}, got {value!r}")
    return tuple(parts)


def _complete_options(values: Any) -> dict[str, Options]:
    """Return the options of every method; `values` has `Options` or mappings of some methods."""
    if not isinstance(values, Mapping):
        raise ValueError(f"options must be an object by method, got {values!r}")
    for name in values:
        checks.choice("options", name, tuple(METHODS))
    found = {}
    for one in methods():
        own = values.get(one.name, {})
        if isinstance(own, Mapping):
            check_option_names(one.name, own)
            own = one.options(**own)
        elif not isinstance(own, one.options):
            raise ValueError(f"options.{one.name} must be an object, got {own!r}")
        found[one.name] = own
    return found


def request_fields() -> tuple[str, ...]:
    """Return the fields that one request may set, including options of the methods.

    Fields that name a path or a resource can only be set by the server.
    """
    return (*_OF_REQUESTS, *(name for one in methods() for name in one.of_requests))


def _check_request(values: object, server_method: str) -> dict[str, Any]:
    """Check the names of a request's fields; return the fields that are not None."""
    if not isinstance(values, Mapping):
        raise ValueError(f"speculative_config must be an object, got {values!r}")
    known = (*request_fields(), *OTHER_FIELDS)
    for key in values:
        if key in known or key == "options":
            continue
        if key in _SHARED or key in all_option_names():
            _refuse_of_server(key, known)
        refuse_unknown(key, known)
    fields = {key: value for key, value in values.items() if value is not None}
    found = translate(fields, _OF_REQUESTS, server_method)
    for name, own in found.get("options", {}).items():
        for key in own:
            if key not in method_of(name).of_requests:
                _refuse_of_server(f"options.{name}.{key}", known)
    return found


def _refuse_of_server(key: str, known: Iterable[str]) -> None:
    raise ValueError(
        f"speculative_config.{key} can only be set by the server; a request may set "
        f"{', '.join(known)}"
    )


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Configuration of drafting and verification, validated on construction.

    `from_dict` and `from_json` also accept the spellings of FastDeploy and vLLM
    (api/speculative_spellings.py).

    Attributes:
        method: "naive" (no drafts), or a method of the registry, in any letter case. Several joined
            by +, such as "a+b", are stages: each stage continues the drafts of the stages before
            it. `require_runnable` checks which methods an engine can run.
        num_speculative_tokens: drafts per step, k. None means the first method's default, usually
            1, and 0 for naive, which accepts no other value. There is no upper limit.
        num_model_steps: drafts per step of a method that runs a model, at most k; later stages
            draft the rest. None means k, or 1 if another stage continues the method.
        verify_strategy: "target_match", "greedy", "rejection", "block" or "topp";
            docs/exactness.md describes the guarantee of each.
        accept_policy: "normal"; for measurements, "accept_all", "reject_all" and "synthetic".
            "accept_all" and "synthetic" do not produce the target's text.
        synthetic_acceptance_rates: with accept_policy "synthetic", the rates at which the first
            draft of a step is emitted, the first two drafts, and so on: at most 1, and not
            increasing. Drafts beyond the last rate are never emitted.
        max_total_draft_tokens: maximum drafts of a step over all requests, which share them evenly.
            None sets no limit.
        adaptive_verification: treat num_speculative_tokens as a maximum: verify the most probable
            drafts, as many as make decoding faster. This applies only where it cannot change a
            token: with verify_strategy "target_match" or "greedy", and accept_policy "normal".
            Otherwise, and if False, all drafts are verified. None: True on a CPU with a model of at
            least 200 MB, whose steps are long enough, and no drafter that runs a model of its own;
            else False.
        options: the options of every method of the registry, by method. In the argument, a method
            may be missing (its options have their defaults) or a mapping from names to values.

    Raises:
        ValueError: a value is out of range, two values contradict each other, or an option
            is unknown.
    """

    method: str = NAIVE
    num_speculative_tokens: int = _UNSET
    num_model_steps: int = _UNSET
    verify_strategy: str = "target_match"
    accept_policy: str = "normal"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    max_total_draft_tokens: int | None = None
    adaptive_verification: bool | None = None
    options: Mapping[str, Options] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        stages = _stages(self.method)
        object.__setattr__(self, "method", "+".join(stages) or NAIVE)
        object.__setattr__(self, "options", _complete_options(self.options))
        checks.spelling(self, "verify_strategy", VERIFY_STRATEGIES)
        checks.spelling(self, "accept_policy", ACCEPT_POLICIES)
        self._resolve_lengths()
        self._check_rates()
        if self.max_total_draft_tokens is not None:
            checks.integer("max_total_draft_tokens", self.max_total_draft_tokens, 0)
        if not isinstance(self.adaptive_verification, (bool, type(None))):
            raise ValueError(
                "adaptive_verification must be true, false or null, got "
                f"{self.adaptive_verification!r}"
            )

    def as_dict(self, *, without_files: bool = False) -> dict[str, Any]:
        """Return the value of every field by name, with `options` as plain dictionaries.

        Args:
            without_files: leave out options that name a file.
        """
        found = {name: getattr(self, name) for name in _SHARED}
        found["options"] = {
            name: {
                key: value
                for key, value in asdict(own).items()
                if not (without_files and key in method_of(name).files)
            }
            for name, own in self.options.items()
        }
        return found

    @property
    def stages(self) -> tuple[str, ...]:
        """Methods that draft, in their order; empty for "naive"."""
        return () if self.method == NAIVE else tuple(self.method.split("+"))

    @property
    def named_methods(self) -> tuple[str, ...]:
        """Methods that this configuration names: its stages, and methods whose files it sets."""
        return tuple(
            name
            for name, own in self.options.items()
            if name in self.stages
            or any(getattr(own, file) is not None for file in method_of(name).files)
        )

    def options_of(self, kind: type[OwnOptions]) -> OwnOptions:
        """Return a method's own options, by their class."""
        return next(one for one in self.options.values() if isinstance(one, kind))

    def _resolve_lengths(self) -> None:
        tokens, steps = self.num_speculative_tokens, self.num_model_steps
        if self.method == NAIVE:
            for name, value in (("num_speculative_tokens", tokens), ("num_model_steps", steps)):
                if value is not None and (isinstance(value, bool) or value != 0):
                    drafting = ", ".join(METHODS)
                    raise ValueError(
                        f'{name} must be 0 or absent with method "naive", which drafts nothing; '
                        f"got {value!r} (methods that draft: {drafting})"
                    )
            tokens = steps = 0
        else:
            is_default = tokens is None
            if is_default:
                tokens = self._first.default_tokens
            checks.integer("num_speculative_tokens", tokens, 1)
            if steps is None:
                is_continued = len(self.stages) > 1 and self._first.needs_weights
                steps = 1 if is_continued else tokens
            checks.integer("num_model_steps", steps, 1)
            if steps > tokens:
                raise ValueError(
                    "num_model_steps must be at most num_speculative_tokens = "
                    f"{tokens}{' (the default)' if is_default else ''}, got {steps}"
                )
        object.__setattr__(self, "num_speculative_tokens", tokens)
        object.__setattr__(self, "num_model_steps", steps)

    def _check_rates(self) -> None:
        rates: Any = self.synthetic_acceptance_rates
        name = "synthetic_acceptance_rates"
        if (rates is not None) != (self.accept_policy == "synthetic"):
            raise ValueError(
                f'{name} and accept_policy "synthetic" must be set together, got {rates!r} with '
                f"{self.accept_policy!r}"
            )
        if rates is None:
            return
        if not isinstance(rates, (list, tuple)) or not rates:
            raise ValueError(f"{name} must be a list of numbers, got {rates!r}")
        highest = 1.0
        for rate in rates:
            checks.number(name, rate, 0.0, 1.0)
            if rate > highest:
                raise ValueError(f"{name} must not increase, got {rate!r} after {highest!r}")
            highest = rate
        object.__setattr__(self, name, tuple(map(float, rates)))

    @property
    def _first(self) -> Method:
        """Method of the first stage."""
        return method_of(self.stages[0])

    @property
    def selects_drafts(self) -> bool:
        """True if the engine selects how many drafts to verify, which changes no token."""
        return (
            self.adaptive_verification is True
            and self.method != NAIVE
            and self.has_exact_verification
        )

    @property
    def has_exact_verification(self) -> bool:
        """True if the output does not depend on the drafts that are verified."""
        exact = self.verify_strategy in ("target_match", "greedy")
        return exact and self.accept_policy == "normal"

    @property
    def draft_stages(self) -> tuple[tuple[str, int], ...]:
        """Drafters of a request in order, each with the maximum number of drafts after it.

        A drafter appends to the drafts of the drafters before it, so its limit includes those.
        """
        steps, tokens = self.num_model_steps, self.num_speculative_tokens
        return tuple(
            (name, steps if method_of(name).needs_weights else tokens) for name in self.stages
        )

    @property
    def drafters_name(self) -> str:
        """Key under which the acceptance statistics of a request's drafters are stored."""
        return "+".join(self.stages)

    @property
    def drafts_with_target_numbers(self) -> bool:
        """True if drafts are sampled with the random numbers that the target will use.

        With the same random number, similar distributions mostly yield the same token. So these
        drafts are accepted more often than the drafter's most likely tokens would be.
        """
        return self.method != NAIVE and self._first.draws and self.verify_strategy == "target_match"

    @property
    def draws_drafts(self) -> bool:
        """True if drafts are sampled with separate random numbers.

        This helps if verification uses both distributions, as "rejection" and "block" do.
        """
        return (
            len(self.stages) == 1
            and self._first.draws
            and self.options[self.method].draws
            and self.verify_strategy in ("rejection", "block")
        )

    def conditional_acceptance_rates(self) -> list[float]:
        """Return each draft's synthetic acceptance rate if all drafts before it were accepted."""
        rates = self.synthetic_acceptance_rates or ()
        before = (1.0, *rates)
        return [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=False)]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SpeculativeConfig":
        """Construct the server's configuration from a mapping.

        Raises:
            ValueError: a key is unknown (the message names the nearest one) or refused, or a value
                is invalid.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"speculative_config must be an object, got {values!r}")
        return cls(**translate(values, _SHARED, NAIVE))

    @classmethod
    def from_json(cls, text: str) -> "SpeculativeConfig":
        """Construct the server's configuration from a JSON object; see `from_dict`."""
        return cls.from_dict(parse_object(text))

    def require_effect(self, given: Mapping[str, Any], methods: Collection[str]) -> None:
        """Check that a loaded method reads each top-level option of a server's configuration.

        Options inside `options` are always accepted: they may be for requests that choose another
        method.

        Args:
            given: the fields from which this configuration was constructed.
            methods: methods that the server loads in addition to those named here.

        Raises:
            ValueError: no loaded method reads a top-level option whose value is not the default, or
                num_model_steps is set although no stage runs a model.
        """
        loaded = {*self.named_methods, *methods}
        for key, value in given.items():
            owners = [name for name in METHODS if key in method_of(name).option_names]
            if not owners or not loaded.isdisjoint(owners):
                continue
            if value != getattr(method_of(owners[0]).options(), key):
                raise ValueError(
                    f"speculative_config.{key} needs method {' or '.join(map(repr, owners))}, got "
                    f"{self.method!r}; for requests that choose their own method, set it in "
                    f"speculative_config.options.{owners[0]}"
                )
        steps = given.get("num_model_steps")
        runs_model = any(method_of(name).needs_weights for name in self.stages)
        if steps is not None and steps != self.num_speculative_tokens and not runs_model:
            raise ValueError(
                "speculative_config.num_model_steps needs a method that runs a model, got "
                f"{self.method!r}; leave it out"
            )

    def override(
        self,
        request: Mapping[str, Any],
        *,
        max_num_speculative_tokens: int | None = None,
        max_num_model_steps: int | None = None,
    ) -> "SpeculativeConfig":
        """Return this configuration with a request's own choices applied.

        If a request sets the method but not the number of drafts, that number is 0 for "naive", and
        otherwise the server's (1 if the server's method is "naive"). If a request changes either
        of them but does not set num_model_steps, that field gets its default.

        Args:
            request: the object that the request sent; a field that is None is not changed.
            max_num_speculative_tokens: maximum number of drafts that the engine supports. None sets
                no limit.
            max_num_model_steps: maximum num_model_steps of a request; a default above it is
                lowered. None sets no limit.

        Raises:
            ValueError: the object has a key a request may not set, a value is invalid, or a value
                exceeds a limit.
        """
        chosen = _check_request(request, self.method)
        self._complete(chosen)
        config = replace(self, **chosen) if chosen else self
        limit = max_num_speculative_tokens
        if limit is not None and config.num_speculative_tokens > limit:
            raise ValueError(
                f"num_speculative_tokens must be at most {limit} on this server, "
                f"got {config.num_speculative_tokens}"
            )
        limit = max_num_model_steps
        runs_model = any(method_of(name).needs_weights for name in config.stages)
        if limit is not None and runs_model and config.num_model_steps > limit:
            if chosen.get("num_model_steps") is not None:
                raise ValueError(
                    f"num_model_steps must be at most {limit} on this server, "
                    f"got {config.num_model_steps}"
                )
            config = replace(config, num_model_steps=limit)
        return config

    def choices_of(
        self,
        params: object,
        request: Mapping[str, Any] | None,
        available: Collection[str],
    ) -> Mapping[str, Any] | None:
        """Return a request's own choices, plus the method that one of its parameters selects.

        Args:
            params: the request's sampling parameters.
            request: the object that it sent; a method named there takes precedence.
            available: the methods that the engine can run. Other methods are not added: the
                parameter is a hint that changes no token.
        """
        own = dict(request) if isinstance(request, Mapping) else {}
        for method in methods():
            is_selected = method.parameter is not None and getattr(params, method.parameter, None)
            if not is_selected or own.get("method") is not None or method.name in self.stages:
                continue
            if method.name not in available:
                continue
            own["method"] = "+".join((*self.stages, method.name))
            if self.stages and self._first.needs_weights:  # it drafts as many as before
                own.setdefault("num_model_steps", self.num_model_steps)
            return own
        return request

    def _complete(self, chosen: dict[str, Any]) -> None:
        """Add the fields that follow from a request's choices to `chosen`."""
        if "options" in chosen:
            own = {
                name: replace(self.options[name], **of) for name, of in chosen["options"].items()
            }
            chosen["options"] = {**self.options, **own}
        stages = _stages(chosen.get("method", self.method))
        if stages != self.stages:
            keeps = bool(stages and self.stages)
            default = self.num_speculative_tokens if keeps else None
            chosen.setdefault("num_speculative_tokens", default)
        if "num_speculative_tokens" in chosen:
            chosen.setdefault("num_model_steps", None)
        if chosen.get("accept_policy", "synthetic") != "synthetic":
            chosen.setdefault("synthetic_acceptance_rates", None)

    def require_runnable(
        self,
        available: Collection[str],
        strategies: Collection[str] = VERIFY_STRATEGIES,
        *,
        missing: Mapping[str, str] | None = None,
    ) -> None:
        """Check that an engine can run this configuration.

        Args:
            available: the methods that the engine can run.
            strategies: the verification strategies that it can run.
            missing: method -> reason why the engine cannot run it.

        Raises:
            ValueError: a method or the strategy is not available.
        """
        # A later stage without weights can always run.
        others = [name for name in self.stages[1:] if method_of(name).needs_weights]
        for method in (*self.stages[:1], *others) or (NAIVE,):
            if method not in available:
                reason = (missing or {}).get(method)
                raise ValueError(
                    f'method "{method}" cannot run in this engine, which has '
                    f"{', '.join(available)}{f': {reason}' if reason else ''}"
                )
        if self.verify_strategy not in strategies:
            raise ValueError(
                f'verify_strategy "{self.verify_strategy}" cannot run in this engine, which has '
                f"{', '.join(strategies)}"
            )


# Fields that all methods share.
_SHARED = tuple(one.name for one in fields(SpeculativeConfig) if one.name != "options")
