# SPDX-License-Identifier: Apache-2.0
"""Configuration of an engine."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specops.api.methods import (
    METHODS,
    NAIVE,
    Method,
    checks,
    default_method,
    method_of,
)
from specops.api.methods.checks import QUANTIZATIONS
from specops.api.speculative_config import SpeculativeConfig
from specops.checkpoints.gguf_directory import SUFFIX as GGUF_SUFFIX
from specops.checkpoints.gguf_directory import gguf_directory

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "assets"
BUNDLED_MODEL_NAME = "specops-bundled"

ALL_METHODS = "all"  # value of `EngineConfig.methods`

# Minimum bytes of weights for adaptive_verification: with a smaller model, selecting drafts takes
# almost as long as verifying them.
_LEAST_SELECTED_BYTES = 200_000_000

# Maximum num_model_steps of a request; the server's configuration may exceed it. Each one is a pass
# of the draft model that all requests of a step wait for.
_MAX_REQUESTED_MODEL_STEPS = 16

_CHOICES: dict[str, tuple[str, ...] | tuple[int, ...]] = {
    "dtype": ("auto", "bfloat16", "float32"),
    "json_whitespace": ("bounded", "any", "none"),
    "kv_cache_dtype": ("auto", "int8", "fp8_e4m3"),
    "load_format": ("auto", "dummy"),
    "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
    "numerics": ("native", "portable"),
    "page_size": (16, 32, 64),
    "quantization": QUANTIZATIONS,
    "quantize_head": QUANTIZATIONS,
}


def _default_drafts() -> SpeculativeConfig:
    return SpeculativeConfig(method=default_method(), num_speculative_tokens=4)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Configuration of an engine. Paths and resources belong here, never in a request.

    Attributes:
        model: Hugging Face directory, or GGUF file; None is the model that ships with the package.
        speculative_config: the method for requests that do not choose their own.
        methods: further methods that requests may choose. The methods named in speculative_config
            and the methods without weights can always be chosen. "all" means every method that
            the model can run. All of them take memory for weights and pages. None: all methods for
            the bundled model, which is small, and no further methods for any other model.
        served_model_name: the name clients use; the directory's name when absent.
        dtype: "auto" (the checkpoint's), "bfloat16" or "float32".
        kv_cache_dtype: dtype of stored keys and values: "auto" (the model's dtype), or "int8" or
            "fp8_e4m3" with a scale per token and head, which need half the memory and are slightly
            less accurate. Speculation still changes no bit.
        quantization: quantization of the layers' projections at load time: "none", or FastDeploy's
            "wint8" (8 bits per weight, a scale per output), "wint4" (4 bits, a scale per 128
            inputs of an output) or "mix_quant" (wint4 for experts, wint8 for all else). They
            need half or a quarter of the memory of bfloat16 and are slightly less accurate.
            Embedding and norms are not quantized. Speculation still changes no bit.
        quantize_head: the same for the LM head, which few other engines quantize.
        device: "auto" (a GPU where this build and this machine can use one, else the CPU), "cpu",
            "cuda" or "cuda:N".
        enforce_eager: on a GPU, launch every step's kernels one by one rather than replay the
            steps that repeat as CUDA graphs. The bits are the same.
        load_format: "auto" reads the checkpoint; "dummy" makes random weights on the device
            instead, for measurements; the directory then needs no weights.
        weight_cache: where packed CPU weights are kept, so that the next engine only has to map
            them: a folder; "auto", a folder in the user's cache directory, for GGUF files
            and checkpoints of 256 MiB and more; or "none".
        weight_cache_bytes: maximum size of the cache. The least recently used entry is evicted.
        logprobs_mode: which distribution logprobs refer to: "raw_logprobs", the model's own logits;
            or "processed_logprobs", the distribution that the token was drawn from, after
            penalties, temperature and all filters (at temperature 0: after penalties).
        json_whitespace: white space allowed between JSON tokens when a request constrains its
            output to JSON and does not set this itself: "bounded", what JSON printers write (a
            space, or a line end and indentation); "any", any amount; or "none".
        page_size: tokens per KV page: 16, 32 or 64.
        num_pages: KV pages; by default enough for max_num_seqs requests of full length, but no
            more than fit in `kv_cache_bytes`.
        kv_cache_bytes: upper bound of the memory of the default num_pages; when absent, 4 GiB on
            the CPU, and on a GPU most of the memory that the weights leave free.
        state_cache_bytes: part of kv_cache_bytes reserved for recurrent states of cached prefixes,
            used by models with linear attention; a quarter when absent. See docs/models.md.
        tensor_parallel_size: number of ranks that compute the model together, each with a shard of
            its weights, keys and values. A server starts one process per rank.
        exact_across_tp: number of virtual TP ranks that determines the bits of the results: a
            power of two, and a multiple of tensor_parallel_size. None: tensor_parallel_size.
        enable_expert_parallel: give each virtual TP rank whole experts instead of a part of each
            expert. Sums are then added in another order, so their last bits differ.
        max_num_seqs: maximum number of requests that run at once.
        max_num_batched_tokens: maximum number of rows of one step, prefill chunks and verification
            together. Prompts get at most 128 rows on a CPU and 2,048 on a GPU.
        max_model_len: maximum number of tokens of prompt and output; default: the model's limit.
        enable_prefix_caching: share the pages of equal prefixes.
        enable_cascade_attention: read pages that several requests of a step share only once per
            step. The bits are the same; turn it off only for measurements.
        num_threads: threads of the CPU kernels. Absent: SPECOPS_NUM_THREADS, or the usable CPUs.
        isa: instruction set of the CPU kernels, one of `specops.supported_isas()`. Absent:
            SPECOPS_ISA, or the best one that `numerics` permits.
        numerics: "native", the fastest kernels of this CPU; or "portable", kernels whose results
            have the same bits on every CPU: those of `specops.portable_isas()`.
        seed: seed of the generator that draws seeds for requests without one; None draws them from
            the operating system.
        max_waiting: maximum number of waiting requests; further requests are refused.
        enable_lora: let requests choose LoRA adapters; implied by lora_modules.
        lora_modules: name and directory of each LoRA adapter to load; see docs/lora.md.
        max_lora_rank: largest rank of a LoRA adapter.
        max_loras: maximum number of loaded LoRA adapters; a step may use all of them.
        suffix_corpus: a text file, or a folder of text files, that suffix decoding drafts from in
            the same way as from responses it has seen; see docs/drafters.md.
        suffix_cache: file of responses that suffix decoding drafts from. It is read if it exists;
            `Engine.save_drafters` writes it.
    """

    model: str | None = None
    speculative_config: SpeculativeConfig = field(default_factory=_default_drafts)
    methods: tuple[str, ...] | None = None
    served_model_name: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "none"
    quantize_head: str = "none"
    device: str = "auto"
    enforce_eager: bool = False
    load_format: str = "auto"
    weight_cache: str = "auto"
    weight_cache_bytes: int = 64 << 30
    logprobs_mode: str = "raw_logprobs"
    json_whitespace: str = "bounded"
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    state_cache_bytes: int | None = None
    tensor_parallel_size: int = 1
    exact_across_tp: int | None = None
    enable_expert_parallel: bool = False
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    enable_cascade_attention: bool = True
    num_threads: int | None = None
    isa: str | None = None
    numerics: str = "native"
    seed: int | None = None
    max_waiting: int = 256
    enable_lora: bool = False
    lora_modules: tuple[tuple[str, str], ...] = ()
    max_lora_rank: int = 16
    max_loras: int = 64
    suffix_corpus: str | None = None
    suffix_cache: str | None = None

    @classmethod
    def from_plain(cls, settings: Mapping[str, Any]) -> "EngineConfig":
        """Make a configuration from plain data, in which speculative_config is JSON text.

        Raises:
            ValueError: a value is invalid.
        """
        fields = dict(settings)
        if "speculative_config" in fields:
            fields["speculative_config"] = SpeculativeConfig.from_json(fields["speculative_config"])
        return cls(**fields)

    def __post_init__(self) -> None:
        if not isinstance(self.speculative_config, SpeculativeConfig):
            raise ValueError(
                f"speculative_config must be a SpeculativeConfig, got {self.speculative_config!r}"
            )
        self._check_methods()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, str):
                value = value.lower()
                object.__setattr__(self, name, value)
            # Compare types first: True equals 1.
            if type(value) is not type(choices[0]) or value not in choices:
                *most, last = map(str, choices)
                raise ValueError(f"{name} must be {', '.join(most)} or {last}, got {value!r}")
        texts = ("device", "weight_cache")
        for name in (*texts, "model", "served_model_name", "suffix_corpus", "suffix_cache"):
            value = getattr(self, name)
            if (value is not None or name in texts) and not (isinstance(value, str) and value):
                raise ValueError(f"{name} must be a non-empty string, got {value!r}")
        flags = (
            "enforce_eager",
            "enable_prefix_caching",
            "enable_cascade_attention",
            "enable_expert_parallel",
            "enable_lora",
        )
        for name in flags:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        optional = (
            "num_pages",
            "max_model_len",
            "num_threads",
            "kv_cache_bytes",
            "exact_across_tp",
            "state_cache_bytes",
        )
        needed = (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_waiting",
            "max_lora_rank",
            "max_loras",
            "weight_cache_bytes",
            "tensor_parallel_size",
        )
        for name in (*optional, *needed):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        seed = self.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"seed must be an integer, got {seed!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs={self.max_num_seqs} "
                f"(every running request needs a row), got {self.max_num_batched_tokens}"
            )
        self._check_ranks()
        self._check_adapters()
        for options in self.speculative_config.options.values():
            options.check_engine(self)
        drafts = self.speculative_config.num_speculative_tokens
        if drafts >= self.max_num_batched_tokens:
            raise ValueError(
                f"num_speculative_tokens must be below max_num_batched_tokens="
                f"{self.max_num_batched_tokens}, got {drafts}"
            )

    def _check_ranks(self) -> None:
        size, num_ranks = self.exact_across_tp, self.tensor_parallel_size
        if size is not None and (size & (size - 1) or size % num_ranks):
            raise ValueError(
                "exact_across_tp must be a power of two and a multiple of tensor_parallel_size="
                f"{num_ranks}, got {size}"
            )
        if self.enable_expert_parallel and self.num_virtual_ranks == 1:
            raise ValueError(
                "enable_expert_parallel needs tensor_parallel_size or exact_across_tp above 1, "
                "got 1"
            )

    def _check_adapters(self) -> None:
        modules = self.lora_modules
        if not isinstance(modules, (list, tuple)):
            raise ValueError(f"lora_modules must be pairs of a name and a path, got {modules!r}")
        for pair in modules:
            is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
            if not is_pair or not all(isinstance(one, str) and one for one in pair):
                raise ValueError(f"lora_modules must be pairs of a name and a path, got {pair!r}")
            checks.adapter_name(pair[0])
        names = [name for name, _ in modules]
        if len(names) > self.max_loras:
            raise ValueError(
                f"max_loras must be at least the {len(names)} of lora_modules, got {self.max_loras}"
            )
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"lora_modules must have different names, got {repeated[0]!r} twice")
        object.__setattr__(self, "lora_modules", tuple(map(tuple, modules)))

    @property
    def uses_adapters(self) -> bool:
        """True if requests may choose LoRA adapters."""
        return self.enable_lora or bool(self.lora_modules)

    def _check_methods(self) -> None:
        if self.methods is None:
            return
        if isinstance(self.methods, str) or not isinstance(self.methods, (list, tuple)):
            raise ValueError(f"methods must be a list of names, got {self.methods!r}")
        for name in self.methods:
            checks.choice("methods", name, (ALL_METHODS, *METHODS))
        object.__setattr__(self, "methods", tuple(self.methods))

    def wants_method(self, method: Method) -> bool:
        """Return whether to load a method; requests that name another method are refused."""
        return not method.needs_weights or self.names_method(method.name) or self.wants_all_methods

    def names_method(self, name: str) -> bool:
        """Return whether this configuration names a method, which must then be able to run."""
        return name in (*self.speculative_config.named_methods, *(self.methods or ()))

    @property
    def wants_all_methods(self) -> bool:
        """True if every method that the model can run must be loaded."""
        if self.methods is None:
            return self.model_dir == BUNDLED_MODEL
        return ALL_METHODS in self.methods

    def speculative_for(
        self,
        override: Mapping[str, object] | SpeculativeConfig | None,
        methods: Collection[str],
        missing: Mapping[str, str] | None = None,
        params: object = None,
    ) -> SpeculativeConfig:
        """Return the configuration that a request runs with, given its own `speculative_config`.

        Args:
            override: the request's own choices; None for the engine's configuration; or an earlier
                result of this method, which is returned as it is.
            methods: the methods the engine can run.
            missing: method -> reason why the engine cannot run it, for the client.
            params: the request's `SamplingParams`; one of its fields may select a method.

        Raises:
            ValueError: the object has a key a request may not set, a value is invalid, or the
                engine cannot run the result.
        """
        if isinstance(override, SpeculativeConfig):
            return override
        chosen = self.speculative_config
        override = chosen.choices_of(params, override, methods)
        if override is not None:
            chosen = chosen.override(
                override,
                max_num_speculative_tokens=self.max_num_batched_tokens - 1,
                max_num_model_steps=max(_MAX_REQUESTED_MODEL_STEPS, chosen.num_model_steps),
            )
        chosen.require_runnable(methods, missing=missing)
        return chosen

    @property
    def num_virtual_ranks(self) -> int:
        """Number of virtual TP ranks: the number of partial sums that each all-reduce adds."""
        return self.exact_across_tp or self.tensor_parallel_size

    def decided_for(self, device: str) -> "EngineConfig":
        """Return a copy in which `adaptive_verification` is True or False instead of None.

        Args:
            device: "cpu" or "cuda".
        """
        own = self.speculative_config
        if own.adaptive_verification is not None:
            return self
        weights = (".safetensors", GGUF_SUFFIX)
        files = [file for file in self.model_dir.glob("*") if file.suffix in weights]
        is_long = sum(file.stat().st_size for file in files) >= _LEAST_SELECTED_BYTES
        # Drafts of a draft model or head are not selected: the cost of its passes is unknown here.
        is_known = not any(method_of(name).needs_weights for name, _ in own.draft_stages)
        is_long = device == "cpu" and is_long and is_known and own.method != NAIVE
        return replace(self, speculative_config=replace(own, adaptive_verification=is_long))

    @property
    def model_dir(self) -> Path:
        """Directory to load: for a GGUF file, a directory in the user's cache that is made from it.

        Raises:
            ModelError: the GGUF file is missing or damaged, or cannot be read.
        """
        if self.model is None:
            return BUNDLED_MODEL
        path = Path(self.model)
        return gguf_directory(path) if path.suffix == GGUF_SUFFIX else path

    @property
    def model_name(self) -> str:
        """Name that clients use for the model."""
        if self.served_model_name is not None:
            return self.served_model_name
        if self.model is None:
            return BUNDLED_MODEL_NAME
        return Path(self.model).resolve().name.removesuffix(GGUF_SUFFIX)
