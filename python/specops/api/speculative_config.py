# SPDX-License-Identifier: Apache-2.0
"""Speculative configuration of the server, and the part of it that a request may change.

The fields here are common to all drafting methods; each method adds its own (`Options` in
api/methods). The names are FastDeploy's, so that its configurations can be reused;
docs/drafters.md lists each field and each difference. Every invalid configuration raises a
ValueError that says what is valid.
"""

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, TypeVar, cast

from specops.api.methods import (
    METHODS,
    NAIVE,
    Method,
    Options,
    checks,
    drafting_order,
    method_names,
    method_of,
    methods,
    option_names,
)

VERIFY_STRATEGIES = ("target_match", "greedy", "rejection", "block", "topp")
ACCEPT_POLICIES = ("normal", "accept_all", "reject_all", "synthetic")

# FastDeploy's fields that this engine refuses, each with the reason.
REFUSED_FIELDS = {
    "max_candidate_len": "topp looks at the whole top-p set, not at a list of candidates",
    "verify_window": "a rejected draft is never let through by the drafts behind it",
    "num_gpu_block_expand_ratio": "the drafter's pages come from the engine's own page pool",
    "model_type": "the engine knows which model is the drafter",
    "sharing_model": "the drafter always shares the target's embedding and LM head",
    "benchmark_mode": 'say accept_policy "reject_all" to measure verification without acceptance',
    "enf_gen_phase_tag": "reasoning phases are not supported yet",
    "enable_draft_logprob": "logprobs of drafts are not supported yet",
}

# Fields that a request may set, besides those of the methods' own options.
_OF_REQUESTS = (
    "method",
    "num_speculative_tokens",
    "num_model_steps",
    "verify_strategy",
    "accept_policy",
    "synthetic_acceptance_rates",
    "adaptive_verification",
    "tree",
)
# Strategies and policies that can verify trees.
_TREE_STRATEGIES = ("target_match", "greedy", "rejection")
_TREE_POLICIES = ("normal", "reject_all")
_ALONE = "default"  # value of `Method.continued_by` if no method continues it
_UNSET = cast(int, None)  # replaced in `__init__`, so that readers see plain integers

OwnOptions = TypeVar("OwnOptions", bound=Options)


def _stages(value: object) -> tuple[str, ...]:
    """Return the canonical names of the methods in a `method` field; empty for "naive"."""
    names = method_names()
    spelt = {alias: one.name for one in methods() for alias in one.aliases}
    spellings = value.lower().split("+") if isinstance(value, str) else [value]
    parts: list[Any] = [spelt.get(str(part), part) for part in spellings]
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


def _object(text: str) -> dict[str, Any]:
    """Parse the JSON object in `text`; duplicate keys are an error."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) < len(items):
            names = [name for name, _ in items]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"speculative_config has {', '.join(twice)} more than once")
        return out

    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ValueError(f"speculative_config is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("speculative_config is not valid: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"speculative_config must be a JSON object, got {text.strip()!r}")
    return value


def _refuse_unknown(key: object, known: Iterable[str]) -> None:
    if not isinstance(key, str):
        raise ValueError(f"speculative_config has a key that is not a string: {key!r}")
    if key in REFUSED_FIELDS:
        raise ValueError(f"speculative_config.{key} is refused: {REFUSED_FIELDS[key]}")
    if "lora" in key.lower() or "adapter" in key.lower():
        raise ValueError(f"speculative_config.{key} is refused: LoRA is not supported yet")
    for name, own in (pair for one in methods() for pair in one.names_of_vllm):
        if key == name:
            raise ValueError(f"speculative_config.{key} is a field of vLLM; use {own}")
    nearest = difflib.get_close_matches(key.lower(), list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else f"; known: {', '.join(known)}"
    raise ValueError(f"speculative_config has no field {key!r}{hint}")


def _own_options(
    options: Any, values: Mapping[str, Any], stages: tuple[str, ...]
) -> dict[str, Options]:
    """Return the options of every method.

    Args:
        options: by method, `Options` or mappings.
        values: single fields, which override `options`.
        stages: methods that take precedence if several methods have a field of the same name.
    """
    try:
        by_method = dict(options)
    except (TypeError, ValueError):
        raise ValueError(f"options must be an object by method, got {options!r}") from None
    for name, own in by_method.items():
        checks.choice("options", name, tuple(METHODS))
        if not isinstance(own, (Mapping, method_of(name).options)):
            raise ValueError(f"options.{name} must be an object, got {own!r}")
    fields_of = {one.name: one.option_names for one in methods()}
    changes: dict[str, dict[str, Any]] = {name: {} for name in fields_of}
    for key, value in values.items():
        owners = [name for name in (*stages, *fields_of) if key in fields_of[name]]
        if not owners:
            _refuse_unknown(key, SpeculativeConfig.field_defaults())
        changes[owners[0]][key] = value
    found: dict[str, Options] = {}
    for one in methods():
        own = by_method.get(one.name, {})
        if isinstance(own, Mapping):
            for key in own:
                if key not in one.option_names:
                    _refuse_unknown(key, one.option_names)
            own = one.options(**own)
        found[one.name] = replace(own, **changes[one.name]) if changes[one.name] else own
    return found


def _continued(stages: tuple[str, ...], options: dict[str, Options]) -> tuple[str, ...]:
    """Return the stages, completed by `continued_by` fields; update these fields in `options`."""
    for one in methods():
        if one.continued_by is None:
            continue
        value = getattr(options[one.name], one.continued_by)
        if stages[:1] != (one.name,):
            if value != _ALONE:
                raise ValueError(
                    f'{one.continued_by} {value!r} needs method "{one.name}", got '
                    f"{'+'.join(stages) or NAIVE!r}"
                )
        elif len(stages) == 1:
            follower = () if value == _ALONE else (value.removeprefix("with_"),)
            stages += follower
        elif value == _ALONE:
            same = {one.continued_by: f"with_{stages[1]}"}
            options[one.name] = replace(options[one.name], **same)
        elif value != f"with_{stages[1]}":
            raise ValueError(
                f"{one.continued_by} {value!r} contradicts method {'+'.join(stages)!r}"
            )
    return stages


def _can_draft_trees(stages: tuple[str, ...]) -> bool:
    """Return whether the drafts of these methods may be a tree."""
    if not stages:
        return False
    first, *others = map(method_of, stages)
    return first.can_draft_trees and all(one.may_branch for one in others)


def request_fields() -> tuple[str, ...]:
    """Return the fields that one request may set for itself.

    Fields that name a path or a resource can only be set by the server.
    """
    return (*_OF_REQUESTS, *option_names(of_requests=True))


def _check_request(values: object) -> dict[str, Any]:
    """Check the keys of a request's object; return its fields that are not None, unchecked."""
    if not isinstance(values, Mapping):
        raise ValueError(f"speculative_config must be an object, got {values!r}")
    known = request_fields()
    for key in values:
        if key in known:
            continue
        if key in SpeculativeConfig.field_defaults() or key == "options":
            raise ValueError(
                f"speculative_config.{key} can only be set for the server; a request may set "
                f"{', '.join(known)}"
            )
        _refuse_unknown(key, known)
    strategies = {one.continued_by for one in methods()}
    return {
        key: value.lower() if key in strategies and isinstance(value, str) else value
        for key, value in values.items()
        if value is not None
    }


@dataclass(frozen=True, init=False)
class SpeculativeConfig:
    """Configuration of drafting and verification, validated on construction.

    It is constructed by keyword from the fields below and the fields of every method's own options;
    both are read as attributes. A field that several methods have, such as `model`, belongs to the
    first of this configuration's methods that has it, else to the first in the registry; use
    `options` to set it for a particular method.

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
        max_total_draft_tokens: most drafts of a step over all requests, which share them evenly.
            None sets no limit.
        adaptive_verification: treat num_speculative_tokens as a maximum: verify the most probable
            drafts, as many as make decoding faster. This applies only where it cannot change a
            token: with verify_strategy "target_match" or "greedy", and accept_policy "normal".
            Otherwise, and if False, all drafts are verified. None: True on a CPU with a model of at
            least 200 MB, whose steps are long enough, and no drafter that runs a model of its own;
            else False.
        tree: draft a tree of the most probable continuations instead of a single chain; k is the
            number of its nodes. It needs a method that can draft trees, alone or before methods
            that can add branches (the tree then holds the most probable nodes of all),
            verify_strategy "target_match", "greedy" or "rejection", and accept_policy "normal" or
            "reject_all". In a step that also verifies drafts of other strategies or policies, only
            the first path of the tree is verified.
        options: the own fields of every method of the registry, by method. The argument may also be
            a mapping from methods to mappings of their fields, as in JSON.

    Raises:
        ValueError: a value is out of range, two values contradict each other, or a field is
            unknown.
    """

    method: str = NAIVE
    num_speculative_tokens: int = _UNSET
    num_model_steps: int = _UNSET
    verify_strategy: str = "target_match"
    accept_policy: str = "normal"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    max_total_draft_tokens: int | None = None
    adaptive_verification: bool | None = None
    tree: bool = False
    options: tuple[tuple[str, Options], ...] = field(default=())

    def __init__(self, **values: Any) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, values.pop(one.name, one.default))
        stages = _stages(self.method)
        options = _own_options(self.options, values, stages)
        stages = _continued(stages, options)
        object.__setattr__(self, "method", "+".join(stages) or NAIVE)
        object.__setattr__(self, "options", tuple(options.items()))
        self._check()

    def __getattr__(self, name: str) -> Any:
        """Return a field of a method's own options."""
        if not name.startswith("_"):
            order = (*self.stages, *METHODS)
            options = dict(self.options)
            for method in order:
                if method in options and name in method_of(method).option_names:
                    return getattr(options[method], name)
        raise AttributeError(f"SpeculativeConfig has no field {name!r}")

    @classmethod
    def field_defaults(cls) -> dict[str, Any]:
        """Return the default of every field by name, including the fields of all methods."""
        found = {one.name: one.default for one in fields(cls) if one.name != "options"}
        for method in methods():
            for one in fields(method.options):
                found.setdefault(one.name, one.default)
        return found

    def as_dict(self, *, without_files: bool = False) -> dict[str, Any]:
        """Return the value of every field by name, including the fields of all methods.

        Args:
            without_files: leave out fields that name a file.
        """
        names = [one.name for one in fields(self) if one.name != "options"]
        names += option_names(without_files=without_files)
        return {name: getattr(self, name) for name in names}

    @property
    def stages(self) -> tuple[str, ...]:
        """Methods that draft, in their order; empty for "naive"."""
        return () if self.method == NAIVE else tuple(self.method.split("+"))

    @property
    def named_methods(self) -> tuple[str, ...]:
        """Methods that this configuration names: its stages, and methods with files."""
        return tuple(
            name
            for name, own in self.options
            if name in self.stages
            or any(getattr(own, file) is not None for file in method_of(name).files)
        )

    def options_of(self, kind: type[OwnOptions]) -> OwnOptions:
        """Return a method's own options, by their class."""
        return next(one for _, one in self.options if isinstance(one, kind))

    def _check(self) -> None:
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
        self._check_tree()

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

    def _check_tree(self) -> None:
        checks.flag("tree", self.tree)
        if not self.tree:
            return
        required: list[tuple[str, str, tuple[str, ...]]] = [
            ("verify_strategy", self.verify_strategy, _TREE_STRATEGIES),
            ("accept_policy", self.accept_policy, _TREE_POLICIES),
        ]
        if not _can_draft_trees(self.stages):
            can = (one.name for one in methods() if one.can_draft_trees)
            more = (one.name for one in methods() if one.may_branch)
            raise ValueError(
                f"tree needs method {' or '.join(map(repr, can))}, which "
                f"{' or '.join(map(repr, more))} may follow, got {self.method!r}"
            )
        for name, value, allowed in required:
            if value not in allowed:
                raise ValueError(
                    f"tree needs {name} {' or '.join(map(repr, allowed))}, got {value!r}"
                )

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
        """True if the engine decides how many drafts are verified; no token depends on it."""
        return (
            self.adaptive_verification is True
            and self.method != NAIVE
            and self.verify_strategy in ("target_match", "greedy")
            and self.accept_policy == "normal"
        )

    @property
    def verifies_trees(self) -> bool:
        """True if a step with a request of this configuration may verify trees."""
        return self.verify_strategy in _TREE_STRATEGIES and self.accept_policy in _TREE_POLICIES

    @property
    def draft_stages(self) -> tuple[tuple[str, int], ...]:
        """Drafters of a request in order, each with the limit of drafts after its stage.

        A drafter continues the drafts of the drafters before it.
        """
        steps, tokens = self.num_model_steps, self.num_speculative_tokens
        return tuple(
            (name, steps if method_of(name).needs_weights else tokens) for name in self.stages
        )

    @property
    def drafters_name(self) -> str:
        """Key under which acceptance probabilities of a request's drafters are stored."""
        return "+".join(self.stages)

    @property
    def drafts_with_target_numbers(self) -> bool:
        """True if a draft is drawn with the random number that the target will use for its token.

        The closer the two distributions, the more often the two draws agree; they agree more often
        than the most likely token does with the target's draw.
        """
        return self.method != NAIVE and self._first.draws and self.verify_strategy == "target_match"

    @property
    def draws_drafts(self) -> bool:
        """True if drafts are drawn with random numbers of their own.

        That pays if verification weighs a draft by both distributions. Drafts of a tree are the
        most likely tokens instead.
        """
        return (
            len(self.stages) == 1
            and self._first.draws
            and dict(self.options)[self.method].draws
            and not self.tree
            and self.verify_strategy in ("rejection", "block")
        )

    def conditional_acceptance_rates(self) -> list[float]:
        """Return each draft's rate given that all before it were emitted; empty without rates."""
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
        known = cls.field_defaults()
        for key in values:
            if key not in known and key != "options":  # before any value is checked
                _refuse_unknown(key, known)
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> "SpeculativeConfig":
        """Construct the server's configuration from a JSON object; see `from_dict`."""
        return cls.from_dict(_object(text))

    def require_effect(self, fields: Mapping[str, Any], methods: Collection[str]) -> None:
        """Check that each field of a server's configuration is read by a method that it loads.

        Args:
            fields: the fields from which this configuration was constructed.
            methods: further methods that the server loads.

        Raises:
            ValueError: a field of another method is not at its default.
        """
        defaults = self.field_defaults()
        named = {*self.named_methods, *methods}
        for key, value in fields.items():
            owners = [name for name in METHODS if key in method_of(name).option_names]
            if owners and value != defaults[key] and named.isdisjoint(owners):
                raise ValueError(
                    f"speculative_config.{key} needs method {' or '.join(map(repr, owners))}, got "
                    f"{self.method!r}; for requests that choose their own method, set it in "
                    f"speculative_config.options.{owners[0]}"
                )
        steps = fields.get("num_model_steps")
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

        A request that only changes the method or the number of drafts gets the lengths that follow
        from it: 0 drafts for "naive", otherwise the server's number (1 if the server has none), and
        the default number of model steps.

        Args:
            request: the object that the request sent; a field that is None is not changed.
            max_num_speculative_tokens: most drafts that the engine supports. None sets no limit.
            max_num_model_steps: most drafts of methods that run a model; also caps their number if
                the request does not set it. None sets no limit.

        Raises:
            ValueError: the object has a key a request may not set, a value is invalid, or a value
                exceeds a limit.
        """
        choices = _check_request(request)
        self._complete(choices)
        config = replace(self, **choices) if choices else self
        limit = max_num_speculative_tokens
        if limit is not None and config.num_speculative_tokens > limit:
            raise ValueError(
                f"num_speculative_tokens must be at most {limit} on this server, "
                f"got {config.num_speculative_tokens}"
            )
        limit = max_num_model_steps
        runs_model = any(method_of(name).needs_weights for name in config.stages)
        if limit is not None and runs_model and config.num_model_steps > limit:
            if choices.get("num_model_steps") is not None:
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
            if self.stages:  # they draft as before, but several stages draft no tree by default
                if self._first.needs_weights:
                    own.setdefault("num_model_steps", self.num_model_steps)
                own.setdefault("tree", False)
            return own
        return request

    def _complete(self, choices: dict[str, Any]) -> None:
        """Add the fields that follow from a request's choices to `choices`."""
        strategies = {one.continued_by: one.name for one in methods() if one.continued_by}
        if "method" in choices or not strategies.keys().isdisjoint(choices):
            self._complete_method(choices, strategies)
        if "num_speculative_tokens" in choices:
            choices.setdefault("num_model_steps", None)
        if choices.get("accept_policy", "synthetic") != "synthetic":
            choices.setdefault("synthetic_acceptance_rates", None)

    def _complete_method(self, choices: dict[str, Any], strategies: Mapping[str, str]) -> None:
        """Add the fields that follow from the methods that a request has chosen.

        Args:
            choices: the request's choices; extended.
            strategies: `continued_by` fields, each with its method.
        """
        stages = _stages(choices.get("method", self.method))
        for field_name, name in strategies.items():
            is_first = self.stages[:1] == (name,)
            if field_name not in choices:
                # A request that names only the method leaves open what continues it.
                keeps = stages == self.stages or (is_first and stages == (name,))
                choices[field_name] = getattr(self, field_name) if keeps else _ALONE
            elif is_first and "method" not in choices:
                stages = stages[:1]
        choices["method"] = "+".join(stages) or NAIVE
        for field_name, name in strategies.items():
            if stages == (name,) and choices[field_name] != _ALONE:
                stages += (str(choices[field_name]).removeprefix("with_"),)
        before = self.stages
        if stages == before:
            return
        keeps = bool(stages and before)
        choices.setdefault("num_speculative_tokens", self.num_speculative_tokens if keeps else None)
        choices.setdefault("num_model_steps", None)
        if stages[:1] != before[:1]:
            choices.setdefault("tree", self.tree and _can_draft_trees(stages))

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
            missing: by method, why the engine cannot run it.

        Raises:
            ValueError: a method or the strategy is not available.
        """
        # A stage that continues the first one and has no weights can always run.
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
