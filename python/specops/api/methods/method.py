# SPDX-License-Identifier: Apache-2.0
"""The description of a drafting method."""

import importlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from specops.api.methods.checks import QUANTIZATIONS, path, spelling


@dataclass(frozen=True, kw_only=True)
class Options:
    """The configuration fields of one method.

    A method with fields derives from this class and checks them in `__post_init__`.
    """

    @property
    def draws(self) -> bool:
        """True if a method that can draw drafts does so with these options."""
        return True

    def check_engine(self, config: Any) -> None:
        """Reject an `EngineConfig` that contradicts these options.

        Raises:
            ValueError: the configuration contradicts them.
        """


@dataclass(frozen=True, kw_only=True)
class WeightOptions(Options):
    """The fields of a method whose weights lie in a separate directory.

    Attributes:
        model: the directory.
        quantization: format that the drafter's projections, including its LM head, are quantized
            to while they are loaded: "none", "wint8", "wint4" or "mix_quant". No token depends on
            it, only the acceptance rate. None: as the target.
    """

    model: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        path("model", self.model)
        if self.quantization is not None:
            spelling(self, "quantization", QUANTIZATIONS)


@dataclass(frozen=True, kw_only=True)
class Method:
    """Description of a drafting method for the rest of the code.

    Attributes:
        name: in the registry and in configurations.
        title: name for users.
        short: name for headings.
        drafter: module whose `load(context)` makes the drafter; imported only then.
        options: class of its own configuration fields.
        of_requests: those of the fields that a request may set. Only the server sets the others.
        files: those of the fields that name a file or folder. Setting one names the method, so that
            it is loaded.
        aliases: other spellings of the name.
        names_of_vllm: pairs (vLLM's name, name here) of fields that vLLM names differently.
        parameter: the sampling parameter that it drafts from. A request that sets it and names no
            method uses this method after the engine's.
        default_tokens: default number of drafts per step.
        needs_weights: whether it runs a model. It is then loaded only if the configuration names
            it, and drafts up to `num_model_steps`.
        can_draft_trees: whether `tree` may be true.
        draws: whether it draws drafts where that pays: with the target's random numbers under
            "target_match", and with its own under "rejection" and "block".
        may_follow: whether it can continue the drafts of another method.
        may_branch: whether it can add branches to a tree of another method.
        is_on_host: whether it drafts on the host, after all methods that draft on the device.
        learns: whether the same request may get other drafts the next time.
        gauges: (name, description) of its drafter's metrics.
    """

    name: str
    title: str
    short: str
    drafter: str
    options: type[Options] = Options
    of_requests: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    names_of_vllm: tuple[tuple[str, str], ...] = ()
    parameter: str | None = None
    default_tokens: int = 1
    needs_weights: bool = False
    can_draft_trees: bool = False
    draws: bool = False
    may_follow: bool = False
    may_branch: bool = False
    is_on_host: bool = False
    learns: bool = False
    gauges: tuple[tuple[str, str], ...] = ()

    @cached_property
    def option_names(self) -> tuple[str, ...]:
        """Names of its own configuration fields."""
        return tuple(one.name for one in fields(self.options))

    def load(self, context: Any) -> Any:
        """Make the drafter from a `DrafterContext`.

        Raises:
            MethodUnavailable: the model does not support this method.
            ModelError: the weights that the configuration names cannot be used.
            ValueError: another file that it names cannot be used.
        """
        return importlib.import_module(self.drafter).load(context)

    def facts(self) -> dict[str, Any]:
        """Return the facts about the method that clients may see, as JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "short": self.short,
            "needs_weights": self.needs_weights,
            "can_draft_trees": self.can_draft_trees,
            "may_follow": self.may_follow,
            "learns": self.learns,
            "parameter": self.parameter,
        }
