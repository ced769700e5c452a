# SPDX-License-Identifier: Apache-2.0
"""Configuration of multi-token prediction; the drafter is in drafters/mtp.py."""

from dataclasses import dataclass

from specops.api.methods import checks
from specops.api.methods.method import Method, Options


@dataclass(frozen=True, kw_only=True)
class MtpOptions(Options):
    """The options of multi-token prediction (MTP) modules.

    Attributes:
        model: directory of the modules. None: they are in the target's checkpoint. Like
            draft_vocab, it may be set although `method` is another one, for requests that choose
            "mtp".
        draft_vocab: safetensors file with the tensor d2t, the tokens that the modules may draft.
            None: they may draft all tokens.
        quantization: format of the modules' projections, and of a copy of the target's LM head that
            they draft with: "none", "wint8", "wint4" or "mix_quant". No token depends on it, only
            the acceptance rate. None: the target's format for the modules' layers, and no copy of
            the LM head.
    """

    model: str | None = None
    draft_vocab: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        checks.path("model", self.model)
        checks.path("draft_vocab", self.draft_vocab)
        if self.quantization is not None:
            checks.spelling(self, "quantization", checks.QUANTIZATIONS)

    @property
    def draws(self) -> bool:
        """True if drafts may be sampled; with a reduced draft vocabulary they stay greedy.

        Sampling them as well would change the outputs of existing seeds.
        """
        return self.draft_vocab is None


METHOD = Method(
    name="mtp",
    title="MTP module",
    short="MTP",
    drafter="specops.engine.drafters.mtp",
    options=MtpOptions,
    files=("model", "draft_vocab"),
    needs_weights=True,
    draws=True,
)
