# SPDX-License-Identifier: Apache-2.0
"""Configuration of multi-token prediction; the drafter is in drafters/mtp.py."""

from dataclasses import dataclass

from specops.engine.drafters.methods import checks
from specops.engine.drafters.methods.method import Method, Options

MTP_STRATEGIES = ("default", "with_ngram", "with_suffix", "with_prediction")


@dataclass(frozen=True, kw_only=True)
class MtpOptions(Options):
    """The source of the modules, and the method that continues them.

    Attributes:
        mtp_strategy: what drafts the rest of the k: "default" (nothing: the modules draft all
            of them, unless num_model_steps is less), "with_ngram", "with_suffix" or
            "with_prediction". The same as method "mtp", "mtp+ngram" and so on.
        model: directory of the modules. None: they are in the target's checkpoint. Like
            draft_vocab it may be set with a method that has no weights, for requests that choose
            "mtp".
        draft_vocab: safetensors file with the tensor d2t, the tokens that the modules may draft.
            None: they may draft all tokens.
        quantization: format of the modules' projections, and of a copy of the target's LM head that
            they draft with: "none", "wint8", "wint4" or "mix_quant". No token depends on it, only
            the acceptance rate. None: the modules' layers as the target's, and its own LM head.
    """

    mtp_strategy: str = "default"
    model: str | None = None
    draft_vocab: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        checks.spelling(self, "mtp_strategy", MTP_STRATEGIES)
        checks.path("model", self.model)
        checks.path("draft_vocab", self.draft_vocab)
        if self.quantization is not None:
            checks.spelling(self, "quantization", checks.QUANTIZATIONS)

    @property
    def draws(self) -> bool:
        """False with a reduced vocabulary: drafts stay greedy, so seeded outputs do not change."""
        return self.draft_vocab is None


METHOD = Method(
    name="mtp",
    title="MTP module",
    short="MTP",
    drafter="specops.engine.drafters.mtp",
    options=MtpOptions,
    of_requests=("mtp_strategy",),
    files=("model", "draft_vocab"),
    continued_by="mtp_strategy",
    needs_weights=True,
    draws=True,
)
