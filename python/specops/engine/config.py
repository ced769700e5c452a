# SPDX-License-Identifier: Apache-2.0
"""Configuration of an engine."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from specops.engine.speculative_config import SpeculativeConfig

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "assets"
BUNDLED_MODEL_NAME = "specops-bundled"


def _fastest_on_bundled_model() -> SpeculativeConfig:
    # Measured by `make bench ONLY=engine`: see docs/engine.md.
    return SpeculativeConfig(method="ngram", num_speculative_tokens=4)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine is set up. Paths and resources live here, never in a request.

    Attributes:
        model: Hugging Face directory; None is the model that ships with the package.
        speculative_config: the method for requests that do not choose their own.
        served_model_name: the name clients use; the directory's name when absent.
        dtype: "auto" (the checkpoint's), "bfloat16" or "float32".
        page_size: tokens per KV page: 16, 32 or 64.
        num_pages: KV pages; by default enough for max_num_seqs requests of full length, but no
            more than `kv_cache_bytes` take.
        kv_cache_bytes: upper bound of the default num_pages.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: rows of one step, prefill chunks and verification together.
        max_model_len: longest prompt and output; the model's own limit when absent.
        enable_prefix_caching: share the pages of equal prefixes.
        num_threads: threads of the CPU kernels; all usable CPUs when absent.
        seed: seeds the seeds that requests without one are given; None draws from the system.
        max_waiting: requests that may wait before further ones are refused.
    """

    model: str | None = None
    speculative_config: SpeculativeConfig = field(default_factory=_fastest_on_bundled_model)
    served_model_name: str | None = None
    dtype: str = "auto"
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int = 4 << 30
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    seed: int | None = None
    max_waiting: int = 256

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "bfloat16", "float32"):
            raise ValueError(f"dtype must be auto, bfloat16 or float32, got {self.dtype!r}")
        if self.page_size not in (16, 32, 64):
            raise ValueError(f"page_size must be 16, 32 or 64, got {self.page_size!r}")
        for name in ("num_pages", "max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "kv_cache_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs={self.max_num_seqs} "
                f"(every running request needs a row), got {self.max_num_batched_tokens}"
            )

        drafts = self.speculative_config.num_speculative_tokens
        if drafts >= self.max_num_batched_tokens:
            raise ValueError(
                f"num_speculative_tokens must be below max_num_batched_tokens="
                f"{self.max_num_batched_tokens}, got {drafts}"
            )

    def speculative_for(
        self, override: Mapping[str, object] | None, methods: Collection[str]
    ) -> SpeculativeConfig:
        """Returns what a request with this `speculative_config` of its own runs with.

        Args:
            override: the request's own choices; None for the engine's configuration.
            methods: the methods the engine can run.

        Raises:
            ValueError: the object has a key a request may not set, a value is invalid, or the
                engine cannot run it.
        """
        chosen = self.speculative_config
        if override is not None:
            chosen = chosen.override(
                override, max_num_speculative_tokens=self.max_num_batched_tokens - 1
            )
        chosen.require_runnable(methods)
        return chosen

    @property
    def model_dir(self) -> Path:
        """The directory to load."""
        return BUNDLED_MODEL if self.model is None else Path(self.model)

    @property
    def model_name(self) -> str:
        """The name clients use for the model."""
        if self.served_model_name is not None:
            return self.served_model_name
        return BUNDLED_MODEL_NAME if self.model is None else self.model_dir.resolve().name
