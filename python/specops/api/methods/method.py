# SPDX-License-Identifier: Apache-2.0
"""The description of a drafting method."""

import importlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from specops.api.methods.checks import QUANTIZATIONS, path, spelling


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of a method's configuration fields.

    A method with fields derives a class from this one and checks the fields in `__post_init__`.
    """

    @property
    def draws(self) -> bool:
        """True unless these options keep a method from sampling its drafts."""
        return True

    def check_engine(self, config: Any) -> None:
        """Reject an `EngineConfig` that contradicts these options.

        Raises:
            ValueError: the configuration contradicts them.
        """


@dataclass(frozen=True, kw_only=True)
class WeightOptions(Options):
    """Fields of a method whose weights are in a separate directory.

    Attributes:
        model: the directory.
        quantization: format that the drafter's projections, including its LM head, are quantized
            to while they are loaded: "none", "wint8", "wint4" or "mix_quant". No token depends on
            it, only the acceptance rate. None: the target's format.
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
        name: name in the registry and in configurations.
        title: name shown to users.
        short: short name for headings.
        drafter: module whose `load(context)` makes the drafter; imported only then.
        options: class of the method's configuration fields.
        of_requests: names of the fields that a request may set; only the server sets the others.
        files: names of the fields that hold a file or folder. A configuration that sets one loads
            the method.
        aliases: other spellings of the name.
        names_of_vllm: pairs (vLLM's name, name here) of fields that vLLM names differently.
        parameter: sampling parameter that the method drafts from. A request that sets it and names
            no method uses this method as a stage after the engine's method.
        default_tokens: default number of drafts per step.
        needs_weights: whether the method runs a model. Such a method is loaded only if the
            configuration names it, and drafts at most `num_model_steps` tokens.
        draws: whether the method can sample drafts: with the target's random numbers under
            "target_match", and with separate ones under "rejection" and "block".
        may_follow: whether the method can continue the drafts of another method.
        is_on_host: whether the method drafts on the host, after all methods that draft on the
            device.
        learns: whether earlier requests change the drafts of later ones.
        gauges: (name, description) of the drafter's metrics.
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
    draws: bool = False
    may_follow: bool = False
    is_on_host: bool = False
    learns: bool = False
    gauges: tuple[tuple[str, str], ...] = ()

    @cached_property
    def option_names(self) -> tuple[str, ...]:
        """Names of the method's own configuration fields."""
        return tuple(one.name for one in fields(self.options))

    def load(self, context: Any) -> Any:
        """Make the drafter from a `DrafterContext`.

        Raises:
            MethodUnavailable: the model does not support this method.
            ModelError: weights that the configuration names cannot be used.
            ValueError: another file that the configuration names cannot be used.
        """
        return importlib.import_module(self.drafter).load(context)

    def facts(self) -> dict[str, Any]:
        """Return the description of the method for clients, as a JSON object."""
        return {
            "name": self.name,
            "title": self.title,
            "short": self.short,
            "needs_weights": self.needs_weights,
            "may_follow": self.may_follow,
            "learns": self.learns,
            "parameter": self.parameter,
        }
