# SPDX-License-Identifier: Apache-2.0
"""Translation of FastDeploy's and vLLM's speculative configurations to SpeculativeConfig.

As in FastDeploy and vLLM, users may write a method's options at the top level of the object, and
FastDeploy's `mtp_strategy` for methods such as "mtp+ngram". Internally, options are nested under
their method in `options`, and each method has one name.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from specops.api.did_you_mean import did_you_mean
from specops.api.methods import METHODS, canonical_name, checks, method_of, methods

_NO_TREES = (
    "the engine verifies chains of drafts; trees are a feature of the ops, for your own loop "
    "(docs/own_loop.md)"
)
# Refused fields, mostly FastDeploy's, with the reasons.
REFUSED_FIELDS = {
    "max_candidate_len": "topp looks at the whole top-p set, not at a list of candidates",
    "verify_window": "a rejected draft is never let through by the drafts behind it",
    "num_gpu_block_expand_ratio": "the drafter's pages come from the engine's own page pool",
    "model_type": "the engine knows which model is the drafter",
    "sharing_model": "the drafter always shares the target's embedding and LM head",
    "benchmark_mode": 'say accept_policy "reject_all" to measure verification without acceptance',
    "enf_gen_phase_tag": "reasoning phases are not supported yet",
    "enable_draft_logprob": "logprobs of drafts are not supported yet",
    **dict.fromkeys(("tree", "medusa_choices", "speculative_token_tree"), _NO_TREES),
}

OTHER_FIELDS = ("mtp_strategy",)  # accepted besides SpeculativeConfig's fields and options

# FastDeploy's `mtp_strategy` -> method that continues the drafts of the MTP modules.
_MTP_STRATEGIES = {
    "default": "",
    "with_ngram": "+ngram",
    "with_suffix": "+suffix",
    "with_prediction": "+prediction",
}


def parse_object(text: str) -> dict[str, Any]:
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


def translate(
    values: Mapping[str, Any], shared: Iterable[str], server_method: str
) -> dict[str, Any]:
    """Return a configuration with every method's options nested under the method in `options`.

    Args:
        values: a configuration of a server, or the object that a request sent.
        shared: fields that all methods share.
        server_method: the method if `values` names none.

    Raises:
        ValueError: a field is unknown (the message names the nearest one), refused, or given twice,
            or `mtp_strategy` contradicts the method.
    """
    known = (*shared, "options", *all_option_names())
    for key in values:
        if key not in (*known, *OTHER_FIELDS):  # check all names before any value
            refuse_unknown(key, known)
    found = {key: value for key, value in values.items() if key in shared}
    if values.get("mtp_strategy") is not None:
        method = _method_with_strategy(found.get("method") or server_method, values["mtp_strategy"])
        if "method" in found or method.lower() != server_method:
            found["method"] = method
    options = _options_by_method(values.get("options"))
    spellings = str(found.get("method") or server_method).lower().split("+")
    stages = map(canonical_name, spellings)
    order = (*(name for name in stages if name in METHODS), *METHODS)
    for key, value in values.items():
        if key in found or key in ("options", *OTHER_FIELDS):
            continue
        owner = next(name for name in order if key in method_of(name).option_names)
        if key in options.setdefault(owner, {}):
            raise ValueError(f"speculative_config names {key} twice: also in options.{owner}")
        options[owner][key] = value
    if options:
        found["options"] = options
    return found


def _method_with_strategy(method: Any, strategy: Any) -> str:
    """Return the method that FastDeploy's `mtp_strategy` stands for."""
    spelling = strategy.lower() if isinstance(strategy, str) else strategy
    checks.choice("mtp_strategy", spelling, tuple(_MTP_STRATEGIES))
    first, _, other = str(method).lower().partition("+")
    follower = _MTP_STRATEGIES[spelling]
    if first != "mtp":
        if follower:
            raise ValueError(f'mtp_strategy {strategy!r} needs method "mtp", got {method!r}')
        return str(method)
    if other and follower != f"+{other}":
        raise ValueError(f"mtp_strategy {strategy!r} contradicts method {method!r}")
    return first + follower


def _options_by_method(by_method: Any) -> dict[str, dict[str, Any]]:
    """Check the shape of an `options` object; return a copy of it."""
    if by_method is not None and not isinstance(by_method, Mapping):
        raise ValueError(f"options must be an object by method, got {by_method!r}")
    options: dict[str, dict[str, Any]] = {}
    for name, own in (by_method or {}).items():
        checks.choice("options", name, tuple(METHODS))
        if not isinstance(own, Mapping):
            raise ValueError(f"options.{name} must be an object, got {own!r}")
        check_option_names(name, own)
        options[name] = dict(own)
    return options


def check_option_names(method: str, options: Iterable[Any]) -> None:
    """Raise ValueError for the first name that is no option of a method."""
    names = method_of(method).option_names
    for name in options:
        if name not in names:
            refuse_unknown(name, names)


def all_option_names() -> tuple[str, ...]:
    """Return the names of the options of all methods, each once."""
    return tuple(dict.fromkeys(name for one in methods() for name in one.option_names))


def refuse_unknown(key: object, known: Iterable[str]) -> None:
    """Raise the ValueError that says why a field is not accepted."""
    if not isinstance(key, str):
        raise ValueError(f"speculative_config has a key that is not a string: {key!r}")
    if key in REFUSED_FIELDS:
        raise ValueError(f"speculative_config.{key} is refused: {REFUSED_FIELDS[key]}")
    if "lora" in key.lower() or "adapter" in key.lower():
        raise ValueError(f"speculative_config.{key} is refused: drafters use no LoRA adapter")
    for name, own in (pair for one in methods() for pair in one.names_of_vllm):
        if key == name:
            raise ValueError(f"speculative_config.{key} is a field of vLLM; use {own}")
    known = list(known)
    hint = did_you_mean(key, known, 0.5) or f"; known: {', '.join(known)}"
    raise ValueError(f"speculative_config has no field {key!r}{hint}")
