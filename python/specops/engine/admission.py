# SPDX-License-Identifier: Apache-2.0
"""Admission: check a prompt and its parameters against the model and build a `Request`."""

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from specops.api.config import EngineConfig
from specops.api.errors import ContextOverflow
from specops.api.outputs import PromptLogprobs
from specops.api.sampling_params import SamplingParams, check_sequences
from specops.api.speculative_config import SpeculativeConfig
from specops.api.structured import StructuredOutput
from specops.api.tokenizer import TextStream, Tokenizer
from specops.engine.drafters.drafting import Drafting
from specops.engine.features import features_of
from specops.engine.models.adapters import Adapter
from specops.engine.request import DraftState, Output, Request
from specops.engine.structured import Grammar, GrammarCompiler, GrammarState


class Admission:
    """Factory of an engine's requests, which validates their arguments.

    Args:
        config: the engine's configuration.
        tokenizer: the model's tokenizer.
        drafting: the drafters that requests may choose.
        max_model_len: maximum number of tokens of a request, prompt and output.
        vocab_size: the model's vocabulary size.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        drafting: Drafting,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.drafting = drafting
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size, whitespace=config.json_whitespace)
        self._arrivals = 0
        self._random = (
            random.Random(config.seed) if config.seed is not None else random.SystemRandom()
        )

    def make(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None,
        choice_index: int,
        speculative_config: Mapping[str, object] | SpeculativeConfig | None,
        owners: Sequence[str],
        adapter: Adapter | None,
        taken: Collection[str],
    ) -> Request:
        """Check the arguments of `Engine.add_request` and build a request from them.

        Args:
            prompt, params, request_id, choice_index, speculative_config, owners: as for
                `Engine.add_request`.
            adapter: LoRA adapter of the request; None: the model alone.
            taken: request ids that are in use.

        Raises:
            ContextOverflow: prompt and max_tokens do not fit the context.
            ValueError: an argument is invalid.
        """
        token_ids = self._prompt_token_ids(prompt)
        room = self._room(token_ids, params)
        self._check_vocabulary(params)
        speculative = self.config.speculative_for(
            speculative_config, self.drafting.methods, self.drafting.missing, params
        )
        self.drafting.check(speculative)
        think_end, inject = self._thinking(params)
        if not 0 <= choice_index < 2**31:
            raise ValueError(f"choice_index must be in [0, 2^31), got {choice_index}")
        request = Request(
            request_id=self._name(request_id, taken),
            arrival=self._arrivals,
            params=params,
            speculative=speculative,
            seed=_signed64(self.draw_seed(64) if params.seed is None else params.seed),
            choice_index=choice_index,
            prompt_len=len(token_ids),
            max_len=len(token_ids) + (room if params.max_tokens is None else params.max_tokens),
            token_ids=token_ids,
            stream=TextStream(self.tokenizer, params.stop),
            owners=tuple(owners),
            adapter=adapter,
            stop_token_ids=self._stop_token_ids(params),
            grammar=self._grammar(params, speculative),
            bad_words=self._bad_words(params),
            think_end_token_id=think_end,
            inject_token_ids=inject,
            prediction=self._prediction(params),
            features=features_of(params, speculative),
            added_at=time.perf_counter(),
            drafts=DraftState.of(speculative),
            output=Output(thinking_state=0 if params.thinks else -1),
            prompt_logprobs=_prompt_logprobs(token_ids, params),
        )
        self.drafting.admit(request)
        self._arrivals += 1
        return request

    def compile(
        self, wanted: StructuredOutput, overdue: Callable[[], None] | None = None
    ) -> Grammar:
        """Compile a constraint to a grammar, or return the one in use; any thread may call this.

        Args:
            wanted, overdue: as in `GrammarCompiler.compile`.

        Raises:
            ValueError: the constraint is not valid or not supported.
        """
        return self._grammars.compile(wanted, overdue)

    def draw_seed(self, bits: int) -> int:
        """Draw a seed of `bits` random bits for a request that has no seed."""
        return self._random.getrandbits(bits)

    def _name(self, asked: str | None, taken: Collection[str]) -> str:
        """Return the requested id, or generate an unused one if the request has none."""
        if asked is None:
            asked = f"request-{self._arrivals}"
            while asked in taken:  # a caller may have chosen this id
                asked += "-"
        if asked in taken:
            raise ValueError(f"request_id {asked!r} is in use")
        return asked

    def _room(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Return how many tokens fit the context after a prompt; reject a larger max_tokens."""
        room = self.max_model_len - len(token_ids)
        if (1 if params.max_tokens is None else params.max_tokens) > room:
            exceeds = "exceeds"
            if params.max_tokens is not None:
                exceeds = f"and max_tokens {params.max_tokens} exceed"
            raise ContextOverflow(
                f"a prompt of {len(token_ids)} tokens {exceeds} the context of "
                f"{self.max_model_len} tokens"
            )
        return room

    def _check_vocabulary(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.vocab_size:
                raise ValueError(
                    f"{name} must be at most the vocabulary's {self.vocab_size}, got {count}"
                )
        name, largest = params.largest_token_id()
        if largest >= self.vocab_size:
            raise ValueError(
                f"{name} must hold token ids of the vocabulary of {self.vocab_size}, got {largest}"
            )

    def _prompt_token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt)
            self._check_ids("prompt", token_ids)
        else:
            if isinstance(prompt, (bytes, bytearray)):
                raise ValueError("prompt must be text or token ids, got bytes")
            token_ids = list(prompt)
            for token_id in token_ids:
                if isinstance(token_id, bool) or not isinstance(token_id, int):
                    raise ValueError(f"prompt must be text or token ids, got {token_id!r} in it")
            self._check_ids("prompt", token_ids)
        if not token_ids:
            raise ValueError("prompt must hold at least one token, got none")
        return token_ids

    def _check_ids(self, field: str, token_ids: Iterable[int]) -> None:
        self.tokenizer.check_ids(field, token_ids, self.vocab_size)

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the request's own stop tokens and the model's end-of-sequence tokens."""
        eos = () if params.ignore_eos else sorted(self.tokenizer.eos_token_ids)
        return tuple(
            dict.fromkeys((*params.stop_token_ids, *(i for i in eos if i < self.vocab_size)))
        )

    def _grammar(
        self, params: SamplingParams, speculative: SpeculativeConfig
    ) -> GrammarState | None:
        """Return the grammar state at the start of a request's output; None without a grammar."""
        if params.structured_output is None:
            return None
        if speculative.accept_policy not in ("normal", "reject_all"):
            raise ValueError(
                "structured_output needs accept_policy 'normal' or 'reject_all', which emit the "
                f"target's tokens alone, got {speculative.accept_policy!r}"
            )
        grammar = self.compile(params.structured_output)
        is_alone = self.config.tensor_parallel_size == 1
        return GrammarState(
            grammar,
            self._stop_token_ids(params),
            params.allowed_token_ids,
            timer=time.thread_time if is_alone else _no_time,
        )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of each bad word, without and with a space before it."""
        sequences = list(params.bad_words_token_ids)
        for word in params.bad_words:
            stem = word.lstrip(" ") or word
            bare = tuple(self.tokenizer.encode(stem, add_special_tokens=False))
            spaced = tuple(self.tokenizer.encode(" " + stem, add_special_tokens=False))
            self._check_ids("bad_words", (*bare, *spaced))
            sequences.append(bare)
            # The sequence without a space also bans every sequence that ends with it.
            if spaced[-len(bare) :] != bare:
                sequences.append(spaced)
        check_sequences("bad_words", tuple(sequences))
        return tuple(dict.fromkeys(sequences))

    def _prediction(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the tokens of the `prediction` parameter."""
        token_ids = params.prediction
        if isinstance(token_ids, str):
            token_ids = tuple(self.tokenizer.encode(token_ids, add_special_tokens=False))
            self._check_ids("prediction", token_ids)
        if len(token_ids) > self.max_model_len:
            raise ValueError(
                f"prediction must hold at most the context's {self.max_model_len} tokens, got "
                f"{len(token_ids)}"
            )
        return token_ids

    def _thinking(self, params: SamplingParams) -> tuple[int, tuple[int, ...]]:
        """Return the token that ends the thinking, and the tokens injected to end it early."""
        if not params.thinks:
            return -1, ()
        think_end = params.think_end_token_id
        if think_end is None:
            ids = self.tokenizer.encode("</think>", add_special_tokens=False)
            if len(ids) != 1:
                raise ValueError(
                    "think_end_token_id must be given: the tokenizer has no token </think>"
                )
            self._check_ids("think_end_token_id", ids)
            (think_end,) = ids
        inject = params.think_inject_token_ids
        return think_end, (think_end,) if inject is None else inject


def _no_time() -> float:
    """Return 0, as a timer that never advances: tensor-parallel ranks must decide the same."""
    return 0.0


def _prompt_logprobs(token_ids: Sequence[int], params: SamplingParams) -> PromptLogprobs | None:
    if params.prompt_logprobs is None:
        return None
    start = params.prompt_logprobs_start
    if start >= len(token_ids):
        raise ValueError(
            "prompt_logprobs_start must be below the number of tokens of the prompt, "
            f"{len(token_ids)}, got {start}"
        )
    return PromptLogprobs(token_ids, params.prompt_logprobs, start)


def _signed64(seed: int) -> int:
    """Return an unsigned 64-bit seed as the signed integer with the same bits."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
