# SPDX-License-Identifier: Apache-2.0
"""How the engine speculates: the server's configuration, and the little of it a request may change.

The field names are FastDeploy's, so that a configuration can move over; docs/drafters.md lists each
field, and each difference. Every refusal is a ValueError that says what would have been right.
"""

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from specops.engine.methods import NAIVE, method_names

METHOD_ALIASES = {"ngram_match": "ngram"}
MTP_STRATEGIES = ("default", "with_ngram", "with_suffix")
NGRAM_MATCHES = ("most_recent", "leftmost")
VERIFY_STRATEGIES = ("target_match", "greedy", "rejection", "block", "topp")
ACCEPT_POLICIES = ("normal", "accept_all", "reject_all", "synthetic")

# Names FastDeploy has and this engine refuses, each with the reason.
REFUSED_FIELDS = {
    "max_candidate_len": "topp looks at the whole top-p set, not at a list of candidates",
    "verify_window": "a rejected draft is never let through by the drafts behind it",
    "quantization": "quantised drafter weights are not supported yet",
    "num_gpu_block_expand_ratio": "the drafter's pages come from the engine's own page pool",
    "model_type": "the engine knows which model is the drafter",
    "sharing_model": "the drafter always shares the target's embedding and LM head",
    "benchmark_mode": 'say accept_policy "reject_all" to measure verification without acceptance',
    "enf_gen_phase_tag": "reasoning phases are not supported yet",
    "enable_draft_logprob": "logprobs of drafts are not supported yet",
}

_MAX_TREE_DEPTH = 2**15 - 1
# What can draft trees, and what can verify them.
_TREE_METHODS = ("ngram", "suffix", "mtp")
_TREE_STRATEGIES = ("target_match", "greedy", "rejection")
_TREE_POLICIES = ("normal", "reject_all")
_UNSET = cast(int, None)  # replaced in __post_init__, so that readers see plain integers


def _choice(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _integer(name: str, value: object, lowest: int, bits: int = 32) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not lowest <= value < 1 << bits - 1:
        raise ValueError(f"{name} must be at least {lowest} and fit {bits} bits, got {value}")


def _number(name: str, value: object, lowest: float, highest: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be in [{lowest:g}, {highest:g}], got {value!r}")


def _method(value: object) -> str:
    """The method's one spelling: lower case, aliases resolved."""
    if isinstance(value, str):
        value = METHOD_ALIASES.get(value.lower(), value.lower())
    _choice("method", value, method_names())
    return cast(str, value)


def _object(text: str) -> dict[str, Any]:
    """The JSON object in `text`; a key given twice is an error, not the last one's win."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) < len(items):
            names = [name for name, _ in items]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"speculative_config names {', '.join(twice)} more than once")
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
    nearest = difflib.get_close_matches(key.lower(), list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else f"; known: {', '.join(known)}"
    raise ValueError(f"speculative_config has no field {key!r}{hint}")


@dataclass(frozen=True, kw_only=True)
class RequestSpeculativeConfig:
    """The part of the configuration that one request may set for itself; None leaves it alone.

    Whatever names a path or a resource is the server's alone. The values are checked when
    `SpeculativeConfig.override` combines them with the server's.

    Attributes:
        method: drafting method; "naive" turns speculation off for this request.
        num_speculative_tokens: drafts per step.
        num_model_steps: forward passes of the drafter per step.
        mtp_strategy: what continues the tokens of MTP modules.
        verify_strategy: how drafts are verified.
        accept_policy: all but "normal" are for measuring.
        synthetic_acceptance_rates: of accept_policy "synthetic".
        min_ngram_size: shortest match of n-gram drafting.
        max_ngram_size: longest match of n-gram drafting.
        ngram_match: which of the longest matches n-gram drafting takes.
        adaptive_verification: verify only the drafts that are worth their rows.
        tree: draft a tree.
    """

    method: str | None = None
    num_speculative_tokens: int | None = None
    num_model_steps: int | None = None
    mtp_strategy: str | None = None
    verify_strategy: str | None = None
    accept_policy: str | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    min_ngram_size: int | None = None
    max_ngram_size: int | None = None
    ngram_match: str | None = None
    adaptive_verification: bool | None = None
    tree: bool | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RequestSpeculativeConfig":
        """Reads a request's own `speculative_config` object.

        Raises:
            ValueError: a key is unknown, refused, or the server's alone.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"speculative_config must be an object, got {values!r}")
        known = [field.name for field in fields(cls)]
        for key in values:
            if key in known:
                continue
            if any(field.name == key for field in fields(SpeculativeConfig)):
                raise ValueError(
                    f"speculative_config.{key} is the server's alone; a request may set "
                    f"{', '.join(known)}"
                )
            _refuse_unknown(key, known)
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How the engine drafts and verifies; valid from the moment it exists.

    Attributes:
        method: "naive" (no drafts), "ngram" (alias "ngram_match"), "suffix" or "mtp", in any letter
            case. Which of them an engine can run is another question: `require_runnable`.
        num_speculative_tokens: drafts per step, k. None gives 1, and 0 for naive, which takes no
            other value. There is no upper limit.
        num_model_steps: drafts of the MTP modules per step, at most k. None gives k, and 1 when
            mtp_strategy is a hybrid.
        mtp_strategy: what drafts the rest of the k: "default" (nothing: the modules draft all
            of them, unless num_model_steps is less), "with_ngram" or "with_suffix".
        verify_strategy: "target_match", "greedy", "rejection", "block" or "topp";
            docs/exactness.md says what each promises.
        accept_policy: "normal"; for measuring, "accept_all", "reject_all" and "synthetic". The
            first and the last of these do not produce the target's text.
        synthetic_acceptance_rates: with accept_policy "synthetic", how often the first draft of a
            step is emitted, the first two, and so on: at most 1, and none above the one before.
            Drafts beyond the last rate are never emitted.
        min_ngram_size: shortest match that n-gram drafting uses.
        max_ngram_size: longest match that n-gram drafting looks for.
        ngram_match: which of the longest matches it takes: "most_recent" or "leftmost".
        max_total_draft_tokens: most drafts of a step, those of all requests together, which share
            them evenly. None sets no limit.
        suffix_decoding_max_tree_depth: longest context the suffix tree holds.
        suffix_decoding_max_cached_requests: finished requests kept in the shared tree; 0 keeps
            none, -1 all.
        suffix_decoding_max_spec_factor: drafts per matched token.
        suffix_decoding_min_token_prob: least estimated probability of a drafted path.
        suffix_decoding_max_cached_tokens: tokens kept in the shared tree; 0 keeps none, -1 all. As
            with the other two budgets, the oldest responses make room.
        suffix_decoding_max_cached_bytes: memory of the shared tree; 0 for no tree, -1 for no limit.
        suffix_decoding_read_on: past the longest context, or where only one text is left, drafts
            read on in the youngest text that matches.
        model: directory of the MTP modules. None takes them from the target's checkpoint. Like
            draft_vocab it may be there with any method, for requests that choose "mtp".
        draft_vocab: safetensors file with the tensor d2t, the tokens that the MTP modules may
            draft. None lets them draft all.
        adaptive_verification: num_speculative_tokens is the most; of these drafts the likely ones
            are verified, as many as make decoding faster. Only where that cannot change a token:
            with verify_strategy "target_match" or "greedy", and accept_policy "normal". Elsewhere,
            and when False, all drafts are verified. None: True on a CPU with a model of at least
            200 MB, whose steps are long enough for it, and False elsewhere.
        tree: drafts are the likeliest continuations as a tree, not the likeliest one, and k is the
            number of its nodes; with "mtp", two tokens for every pass of the modules, and the k
            likeliest of them; with "ngram", what followed the most recent occurrence and the first
            one. With method "ngram", "suffix" or "mtp" (and mtp_strategy "default"),
            verify_strategy "target_match", "greedy" or "rejection", and accept_policy "normal" or
            "reject_all". Where a step verifies drafts of other strategies or policies beside
            them, only its first path is verified.

    Raises:
        ValueError: a value is out of range, or two contradict each other.
    """

    method: str = NAIVE
    num_speculative_tokens: int = _UNSET
    num_model_steps: int = _UNSET
    mtp_strategy: str = "default"
    verify_strategy: str = "target_match"
    accept_policy: str = "normal"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    min_ngram_size: int = 2
    max_ngram_size: int = 5
    ngram_match: str = "most_recent"
    max_total_draft_tokens: int | None = None
    suffix_decoding_max_tree_depth: int = 64
    suffix_decoding_max_cached_requests: int = -1
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_cached_tokens: int = -1
    suffix_decoding_max_cached_bytes: int = -1
    suffix_decoding_read_on: bool = True
    model: str | None = None
    draft_vocab: str | None = None
    adaptive_verification: bool | None = None
    tree: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", _method(self.method))
        _choice("mtp_strategy", self.mtp_strategy, MTP_STRATEGIES)
        _choice("verify_strategy", self.verify_strategy, VERIFY_STRATEGIES)
        _choice("accept_policy", self.accept_policy, ACCEPT_POLICIES)
        if self.mtp_strategy != "default" and self.method != "mtp":
            raise ValueError(
                f'mtp_strategy {self.mtp_strategy!r} needs method "mtp", got {self.method!r}'
            )
        self._resolve_lengths()
        self._check_rates()
        _integer("min_ngram_size", self.min_ngram_size, 1)
        _integer("max_ngram_size", self.max_ngram_size, 1)
        if self.max_ngram_size < self.min_ngram_size:
            raise ValueError(
                f"max_ngram_size must be at least min_ngram_size = {self.min_ngram_size}, "
                f"got {self.max_ngram_size}"
            )
        _choice("ngram_match", self.ngram_match, NGRAM_MATCHES)
        if self.max_total_draft_tokens is not None:
            _integer("max_total_draft_tokens", self.max_total_draft_tokens, 0)
        depth = self.suffix_decoding_max_tree_depth
        _integer("suffix_decoding_max_tree_depth", depth, 1)
        if depth > _MAX_TREE_DEPTH:
            raise ValueError(
                f"suffix_decoding_max_tree_depth must be at most {_MAX_TREE_DEPTH}, got {depth}"
            )
        for budget in ("requests", "tokens", "bytes"):
            name = f"suffix_decoding_max_cached_{budget}"
            _integer(name, getattr(self, name), -1, bits=32 if budget == "requests" else 64)
        _number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0.0, 1e6)
        _number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0.0, 1.0)
        if not isinstance(self.suffix_decoding_read_on, bool):
            raise ValueError(
                f"suffix_decoding_read_on must be true or false, got "
                f"{self.suffix_decoding_read_on!r}"
            )
        for name in ("model", "draft_vocab"):
            path = getattr(self, name)
            if path is not None and not (isinstance(path, str) and path):
                raise ValueError(f"{name} must be a path or null, got {path!r}")
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
                    drafting = ", ".join(method_names()[1:])
                    raise ValueError(
                        f'{name} must be 0 or absent with method "naive", which drafts nothing; '
                        f"got {value!r} (methods that draft: {drafting})"
                    )
            tokens = steps = 0
        else:
            is_default = tokens is None
            if is_default:
                tokens = 1
            _integer("num_speculative_tokens", tokens, 1)
            if steps is None:
                steps = tokens if self.mtp_strategy == "default" else 1
            _integer("num_model_steps", steps, 1)
            if steps > tokens:
                raise ValueError(
                    "num_model_steps must be at most num_speculative_tokens = "
                    f"{tokens}{' (the default)' if is_default else ''}, got {steps}"
                )
        object.__setattr__(self, "num_speculative_tokens", tokens)
        object.__setattr__(self, "num_model_steps", steps)

    def _check_tree(self) -> None:
        if not isinstance(self.tree, bool):
            raise ValueError(f"tree must be true or false, got {self.tree!r}")
        if not self.tree:
            return
        for name, allowed in (
            ("method", _TREE_METHODS),
            ("mtp_strategy", ("default",)),
            ("verify_strategy", _TREE_STRATEGIES),
            ("accept_policy", _TREE_POLICIES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"tree needs {name} {' or '.join(map(repr, allowed))}, "
                    f"got {getattr(self, name)!r}"
                )

    def _check_rates(self) -> None:
        rates: Any = self.synthetic_acceptance_rates
        name = "synthetic_acceptance_rates"
        if (rates is not None) != (self.accept_policy == "synthetic"):
            raise ValueError(
                f'{name} and accept_policy "synthetic" need each other, got {rates!r} with '
                f"{self.accept_policy!r}"
            )
        if rates is None:
            return
        if not isinstance(rates, (list, tuple)) or not rates:
            raise ValueError(f"{name} must be a list of numbers, got {rates!r}")
        highest = 1.0
        for rate in rates:
            _number(name, rate, 0.0, 1.0)
            if rate > highest:
                raise ValueError(f"{name} must not rise, got {rate!r} after {highest!r}")
            highest = rate
        object.__setattr__(self, name, tuple(map(float, rates)))

    @property
    def selects_drafts(self) -> bool:
        """Whether the engine decides how many drafts are verified: no token depends on it then."""
        return (
            self.adaptive_verification is True
            and self.method != NAIVE
            and self.verify_strategy in ("target_match", "greedy")
            and self.accept_policy == "normal"
        )

    @property
    def verifies_trees(self) -> bool:
        """Whether a step may verify trees where a request verifies its drafts so."""
        return self.verify_strategy in _TREE_STRATEGIES and self.accept_policy in _TREE_POLICIES

    @property
    def draft_stages(self) -> tuple[tuple[str, int], ...]:
        """The drafters of a request in their order, each with the drafts that there are behind it.

        A drafter continues what those before it have drafted.
        """
        if self.method == NAIVE:
            return ()
        if self.method != "mtp":
            return ((self.method, self.num_speculative_tokens),)
        first = (self.method, self.num_model_steps)
        if self.mtp_strategy == "default":
            return (first,)
        return (first, (self.mtp_strategy.removeprefix("with_"), self.num_speculative_tokens))

    @property
    def drafters_name(self) -> str:
        """The name by which costs and chances of a request's drafters are kept."""
        return "+".join(name for name, _ in self.draft_stages)

    @property
    def drafts_with_target_numbers(self) -> bool:
        """Whether modules draw a draft with the number that the target will draw its token with.

        The nearer the two distributions, the oftener the two draws agree, and oftener than the
        likeliest token does.
        """
        return self.method == "mtp" and self.verify_strategy == "target_match"

    @property
    def draws_drafts(self) -> bool:
        """Whether modules draw drafts with numbers of their own.

        That pays where verification weighs a draft by both distributions. Those of a tree are the
        likeliest ones.
        """
        return (
            self.method == "mtp"
            and self.mtp_strategy == "default"
            and self.draft_vocab is None
            and not self.tree
            and self.verify_strategy in ("rejection", "block")
        )

    def conditional_acceptance_rates(self) -> list[float]:
        """Per draft, how often it is emitted where all before it were; empty without rates."""
        rates = self.synthetic_acceptance_rates or ()
        before = (1.0, *rates)
        return [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=False)]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SpeculativeConfig":
        """Reads the server's configuration.

        Raises:
            ValueError: a key is unknown (the message names the nearest one) or refused, or a value
                is invalid.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"speculative_config must be an object, got {values!r}")
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                _refuse_unknown(key, known)
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> "SpeculativeConfig":
        """Reads the server's configuration from a JSON object, as `from_dict` does."""
        return cls.from_dict(_object(text))

    def override(
        self,
        request: RequestSpeculativeConfig | Mapping[str, Any],
        *,
        max_num_speculative_tokens: int | None = None,
        max_num_model_steps: int | None = None,
    ) -> "SpeculativeConfig":
        """Returns this configuration with a request's own choices put in.

        A request that changes the method, the number of drafts or mtp_strategy without saying
        more gets the lengths that follow from it: 0 drafts for "naive", otherwise the server's
        number (1 where the server has none), and the default number of model steps.

        Args:
            request: the request's choices, or the object it sent.
            max_num_speculative_tokens: most drafts the engine has room for. None sets no limit.
            max_num_model_steps: most drafts of MTP modules; where the request leaves their number
                open, it is no more than that. None sets no limit.

        Raises:
            ValueError: the object has a key a request may not set, a value is invalid, or the
                request asks for more than a limit.
        """
        if not isinstance(request, RequestSpeculativeConfig):
            request = RequestSpeculativeConfig.from_dict(request)
        asked: dict[str, Any] = {
            field.name: getattr(request, field.name)
            for field in fields(request)
            if getattr(request, field.name) is not None
        }
        if "method" in asked:
            asked["method"] = _method(asked["method"])
            if asked["method"] != self.method:
                asked.setdefault("mtp_strategy", "default")
                asked.setdefault("tree", self.tree and asked["method"] in _TREE_METHODS)
                keep = NAIVE not in (asked["method"], self.method)
                asked.setdefault(
                    "num_speculative_tokens", self.num_speculative_tokens if keep else None
                )
        if asked.get("accept_policy", "synthetic") != "synthetic":
            asked.setdefault("synthetic_acceptance_rates", None)
        strategy = asked.get("mtp_strategy", self.mtp_strategy)
        if "num_speculative_tokens" in asked or strategy != self.mtp_strategy:
            asked.setdefault("num_model_steps", None)
        config = replace(self, **asked)
        limit = max_num_speculative_tokens
        if limit is not None and config.num_speculative_tokens > limit:
            raise ValueError(
                f"num_speculative_tokens must be at most {limit} on this server, "
                f"got {config.num_speculative_tokens}"
            )
        limit = max_num_model_steps
        if limit is not None and config.method == "mtp" and config.num_model_steps > limit:
            if request.num_model_steps is not None:
                raise ValueError(
                    f"num_model_steps must be at most {limit} on this server, "
                    f"got {config.num_model_steps}"
                )
            config = replace(config, num_model_steps=limit)
        return config

    def require_runnable(
        self,
        available: Collection[str],
        strategies: Collection[str] = VERIFY_STRATEGIES,
        *,
        missing: Mapping[str, str] | None = None,
    ) -> None:
        """Refuses a valid configuration that this engine cannot carry out.

        Args:
            available: the methods it can run.
            strategies: the verification strategies it can run.
            missing: why it lacks others, by method.

        Raises:
            ValueError: the method or the strategy is not among them.
        """
        if self.method not in available:
            reason = (missing or {}).get(self.method)
            raise ValueError(
                f'method "{self.method}" cannot run in this engine, which has '
                f"{', '.join(available)}{f': {reason}' if reason else ''}"
            )
        if self.verify_strategy not in strategies:
            raise ValueError(
                f'verify_strategy "{self.verify_strategy}" cannot run in this engine, which has '
                f"{', '.join(strategies)}"
            )
