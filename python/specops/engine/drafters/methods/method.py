# SPDX-License-Identifier: Apache-2.0
"""How a drafting method describes itself."""

import importlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from specops.engine.drafters.methods.checks import QUANTIZATIONS, path, spelling


@dataclass(frozen=True, kw_only=True)
class Options:
    """The fields of the speculative configuration that are one method's own.

    A method with fields derives from this and checks them in `__post_init__`. Their names are those
    that users write, beside the fields that all methods have.
    """

    @property
    def draws(self) -> bool:
        """Whether a method that draws drafts does so with these options."""
        return True

    def check_engine(self, config: Any) -> None:
        """Refuses an `EngineConfig` that these options contradict.

        Raises:
            ValueError: it does.
        """


@dataclass(frozen=True, kw_only=True)
class WeightOptions(Options):
    """The fields of a method whose weights lie in a directory of their own.

    Attributes:
        model: the directory.
        quantization: of the drafter's projections, what makes its logits included, as they are
            loaded: "none", "wint8", "wint4" or "mix_quant". No token depends on it, only how often
            drafts are right. None: as of the target.
    """

    model: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        path("model", self.model)
        if self.quantization is not None:
            spelling(self, "quantization", QUANTIZATIONS)


@dataclass(frozen=True, kw_only=True)
class Method:
    """What others need to know of a drafting method.

    Attributes:
        name: in the registry and in configurations.
        title: who a draft is from, in words.
        short: the same in a heading.
        drafter: the module whose `load(context)` makes the drafter; it is imported only then.
        options: of which class its own fields of the configuration are.
        of_requests: those of the fields that a request may set. The others are the server's alone.
        files: those that name a file or folder. One that is given names the method: it is loaded.
        aliases: other spellings of the name.
        names_of_vllm: vLLM's names of its fields where they are others, each with the name here.
        parameter: the sampling parameter that it drafts from. A request that has it, and names no
            method, has this one behind the engine's.
        default_tokens: drafts per step where nobody says how many.
        continued_by: the field that says which method continues this one, as "with_<method>", or
            "default" for none; in place of "a+b" as `method`. None: there is no such field.
        needs_weights: it runs a model. It is loaded only where the configuration names it, and
            drafts up to `num_model_steps`.
        can_draft_trees: `tree` may be true.
        draws: it draws drafts where that pays: with the target's numbers under "target_match", and
            with numbers of its own under "rejection" and "block".
        may_follow: it can continue what another method has drafted.
        may_branch: where that is a tree, it can add branches to it.
        is_on_host: it drafts on the host, behind all that draft on the device.
        learns: the same request has other drafts the next time.
        gauges: metrics of its drafter, by name, with what each says.
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
    continued_by: str | None = None
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
        """The names of its own fields."""
        return tuple(one.name for one in fields(self.options))

    def load(self, context: Any) -> Any:
        """Makes the drafter, of a `DrafterContext`.

        Raises:
            MethodUnavailable: this model cannot draft so.
            ModelError: the weights that the configuration names cannot be used.
            ValueError: another file that it names cannot be used.
        """
        return importlib.import_module(self.drafter).load(context)

    def facts(self) -> dict[str, Any]:
        """What a client can know of it, as JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "short": self.short,
            "needs_weights": self.needs_weights,
            "can_draft_trees": self.can_draft_trees,
            "may_follow": self.may_follow,
            "continued_by": self.continued_by,
            "learns": self.learns,
            "parameter": self.parameter,
        }
