# SPDX-License-Identifier: Apache-2.0
"""Drafters for vLLM's `method: "custom_class"`: suffix decoding, n-grams, predicted outputs.

    vllm serve DIR --speculative-config '{"method": "custom_class",
        "model": "specops.integrations.vllm.SuffixProposer", "num_speculative_tokens": 8}'

vLLM verifies the drafts, so with exact kernels no drafter here can change a token. This module does
not import vLLM. Only `PredictedOutputs` needs the rest of the plug-in.
"""

import atexit
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specops.integrations.vllm import step_requests
from specops.integrations.vllm.followed_texts import FollowedTexts
from specops.integrations.vllm.request_parameters import prediction_of
from specops.ngram import ngram_propose
from specops.predicted_text import PredictedText
from specops.suffix_tree import SuffixCache

SUFFIX_FILE = "SPECOPS_VLLM_SUFFIX_FILE"
# Default n-gram sizes, which are those of specops' own n-gram drafter.
_MIN_NGRAM, _MAX_NGRAM = 2, 5


class Proposer:
    """Base class of the drafters, with vLLM's interface and the limit on a row's drafts.

    Args:
        vllm_config: vLLM's configuration; num_speculative_tokens and max_model_len are read.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.num_speculative_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.max_model_len = int(vllm_config.model_config.max_model_len)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: vLLM calls this, but there is no model to load."""

    def max_drafts(self, sampled: Sequence[int], num_tokens: int) -> int:
        """Return the maximum number of drafts of a row; 0 if the row has no new token."""
        if not sampled:
            return 0
        return max(0, min(self.num_speculative_tokens, self.max_model_len - num_tokens))


class SuffixProposer(Proposer):
    """Suffix decoding with `specops.SuffixCache`: drafts from the request and earlier responses.

    The configuration's `suffix_decoding_max_tree_depth`, `suffix_decoding_max_cached_requests`,
    `suffix_decoding_max_spec_factor` and `suffix_decoding_min_token_prob` have the meaning of
    vLLM's own method. SPECOPS_VLLM_SUFFIX_FILE names a file of `SuffixCache.save`: it is loaded, if
    it exists, and written when the process ends.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        config = vllm_config.speculative_config
        self.cache = SuffixCache(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
        )
        self._texts = FollowedTexts()
        file = os.environ.get(SUFFIX_FILE)
        if file:
            self._store_in(Path(file), f"vllm {vllm_config.model_config.tokenizer}")

    def _store_in(self, file: Path, label: str) -> None:
        """Load the shared tree from a file, and save it there when the process ends."""
        if file.exists():
            saved_label = SuffixCache.read_label(file)
            if saved_label != label:
                raise ValueError(
                    f"{SUFFIX_FILE} must name a file of {label!r}, got one of {saved_label!r}"
                )
            self.cache.load(file)
        atexit.register(self.cache.save, file, label=label)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Learn each row's new tokens and draft continuations.

        Args:
            sampled_token_ids: new tokens of each row; empty while a prompt is being prefilled.
            num_tokens_no_spec: [rows], int32. Tokens of each row, including the sampled ones.
            token_ids_cpu: [rows, max_model_len], int32. The tokens.
            slot_mappings: ignored.

        Returns:
            Each row's drafts.
        """
        texts = _texts_of(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        step = self._texts.follow(
            [text.tobytes() for text in texts], [len(new) for new in sampled_token_ids]
        )
        for forgotten in step.forgotten:
            self.cache.stop(forgotten)
        drafts: list[list[int]] = []
        for row, (number, text) in enumerate(zip(step.numbers, texts, strict=True)):
            sampled = sampled_token_ids[row]
            if number is None:
                drafts.append([])
                continue
            if row in step.started:
                self.cache.start(number, text[: len(text) - len(sampled)])
            self.cache.extend(number, list(sampled))
            max_drafts = self.max_drafts(sampled, len(text))
            drafts.append(self.cache.speculate(number, max_drafts).token_ids if max_drafts else [])
        return drafts


class NgramProposer(Proposer):
    """Prompt lookup with `specops.ngram.ngram_propose`: drafts from earlier matches in the text.

    The configuration's `prompt_lookup_min` and `prompt_lookup_max` are the n-gram sizes, if the
    method is `ngram`. For `custom_class`, vLLM sets both to 0, and the sizes are 2 and 5.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        config = vllm_config.speculative_config
        self.max_ngram_size = config.prompt_lookup_max or _MAX_NGRAM
        self.min_ngram_size = config.prompt_lookup_min or min(_MIN_NGRAM, self.max_ngram_size)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft from each row's own text. Arguments as in `SuffixProposer.propose`."""
        lens = [int(num_tokens_no_spec[row]) for row in range(len(sampled_token_ids))]
        max_drafts = list(map(self.max_drafts, sampled_token_ids, lens))
        if not any(max_drafts):
            return [[] for _ in max_drafts]
        draft_token_ids = torch.empty((len(max_drafts), max(max_drafts)), dtype=torch.int32)
        _, counts = ngram_propose(
            _tensor(token_ids_cpu)[: len(max_drafts)],
            torch.tensor(lens, dtype=torch.int32),
            torch.tensor(max_drafts, dtype=torch.int32),
            min_ngram_size=self.min_ngram_size,
            max_ngram_size=self.max_ngram_size,
            draft_token_ids=draft_token_ids,
        )
        rows = zip(draft_token_ids.tolist(), counts.tolist(), strict=True)
        return [drafts[:count] for drafts, count in rows]


class PredictedOutputs(Proposer):
    """Predicted outputs: drafts from `prediction_token_ids` in the request's `extra_args`.

    A request without the field gets no drafts, and a prediction ends before the first id that is
    not in the vocabulary. vLLM passes rows without request ids to a proposer;
    the plug-in's part `sampling`, which must be enabled, records the request of each row.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        self._followed: dict[str, PredictedText] = {}

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft from each row's prediction. Arguments as in `SuffixProposer.propose`."""
        rows = step_requests.rows()
        texts = _texts_of(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        followed = {}
        drafts: list[list[int]] = []
        for request, sampled, text in zip(rows, sampled_token_ids, texts, strict=False):
            max_drafts = self.max_drafts(sampled, len(text))
            prediction = self._followed.get(request.request_id)
            if prediction is None or prediction.num_prompt_tokens != request.num_prompt_tokens:
                token_ids = itertools.takewhile(
                    lambda token: token < self._vocab_size, prediction_of(request.sampling_params)
                )
                prediction = PredictedText(list(token_ids), request.num_prompt_tokens)
            followed[request.request_id] = prediction
            drafts.append(prediction.draft(text.tolist(), max_drafts) if max_drafts else [])
        self._followed = followed
        return drafts


def _texts_of(sampled: Sequence[Sequence[int]], num_tokens: Any, token_ids: Any) -> list[Any]:
    """Return the tokens of each row, as views of contiguous int32."""
    rows = token_ids.numpy() if isinstance(token_ids, Tensor) else token_ids
    return [rows[row, : int(num_tokens[row])] for row in range(len(sampled))]


def _tensor(array: Any) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(array)
