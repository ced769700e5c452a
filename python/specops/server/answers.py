# SPDX-License-Identifier: Apache-2.0
"""Answers: a job's outputs as one object or as a stream of chunks.

Answers are built as plain dicts, since a stream builds one per step.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from specops.api.audit import AuditRecord
from specops.api.messages import End, Output
from specops.api.outputs import SpeculativeStats, TokenLogprob
from specops.api.tokenizer import Tokenizer
from specops.server.admission import Permit
from specops.server.api_error import ApiError
from specops.server.jobs import ChoiceOutput, Job, JobFailed, Span
from specops.server.kv_transfer import kv_transfer_extras
from specops.server.logprobs import (
    LegacyLogprobs,
    chat_logprobs,
    joined,
    num_prompt_logprobs,
    vllm_prompt_logprobs,
)
from specops.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
)
from specops.server.reasoning import Piece, Reader, Reasoning
from specops.server.steps import step_report
from specops.server.streaming import dumped, event, with_members
from specops.server.tools import NamedTool
from specops.server.usage import add_stats, metrics, timings, usage

R = TypeVar("R", CompletionRequest, ChatCompletionRequest)

# An answer with this many logprobs takes milliseconds to convert to JSON, so a thread does it.
_MANY_LOGPROBS = 2048

_DONE = b"data: [DONE]\n\n"  # the end of a stream, after an error as well


class Answer(Generic[R]):
    """Answer that collects the choices of one job, in OpenAI's format.

    Attributes:
        frame: first fields of the answer and of its chunks: id, created, model, system_fingerprint.
        ends: ends of the choices that have ended, by their indices.
        error: the error that ended a stream, if any.
    """

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(
        self,
        request: R,
        job: Job,
        tokenizer: Tokenizer,
        model_name: str,
        fingerprint: str,
        new_reader: Callable[[], Reader | None],
    ) -> None:
        self.request: R = request
        self.job = job
        self.tokenizer = tokenizer
        self._new_reader = new_reader
        self.frame: dict[str, Any] = {
            "id": self.id_prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": fingerprint,
        }
        self.ends: dict[int, End] = {}
        self.error: ApiError | None = None
        # By prompt index. The engine sends them with the first output of the prompt's first choice.
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob | None]] = {}
        self._spans: list[Span] = []
        # By choice index, for audit records: tokens and logprobs so far.
        self._audited: dict[int, tuple[list[int], list[TokenLogprob]]] = {}

    async def complete(self, permit: Permit) -> bytes:
        """Wait for all choices and return the complete answer, not streamed, as JSON.

        Args:
            permit: the request's permit. The request holds it while a long answer is converted to
                JSON, so that only one request of a client at a time holds Python's lock for that.
        """
        outputs: dict[int, ChoiceOutput] = {}
        while self.job.num_unfinished:
            for output in await self.job.next_outputs():
                self._note(output)
                outputs[output.output.index] = output
        if self._num_logprobs() < _MANY_LOGPROBS:
            return self._render(outputs)
        await permit.acquire()
        try:
            return await asyncio.to_thread(self._render, outputs)
        finally:
            permit.release()

    def _render(self, outputs: Mapping[int, ChoiceOutput]) -> bytes:
        choices = []
        for index in sorted(outputs):
            output = outputs[index].output
            choice = {**self.choice(output, self.ends[index]), **self._ids(output)}
            choice |= self._audit(index)
            choices.append(with_members(dumped(choice), self.choice_extras(index)))
        body = {**self.frame, "object": self.object_name, **self._totals()}
        body |= kv_transfer_extras(self.ends.values())
        members = {"choices": b"[%b]" % b",".join(choices), **self.extras()}
        return with_members(dumped(body), members)

    def _num_logprobs(self) -> int:
        """Return the number of log-probabilities in the answer, including alternatives."""
        params = self.job.params
        count = 0
        if params.logprobs is not None:
            num_tokens = sum(end.num_tokens for end in self.ends.values())
            count = num_tokens * (1 + params.logprobs)
        return count + num_prompt_logprobs(self.job.prompts, params)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events."""
        options = self.request.stream_options or StreamOptions()
        prompt_tokens = sum(map(len, self.job.prompts))
        num_tokens = 0
        # All chunks begin with the same fields, which are converted to JSON only once.
        begin = event({**self.frame, "object": self.chunk_name}).removesuffix(b"}\n\n") + b","

        def chunk(choices: list[dict[str, Any]], **members: Any) -> bytes:
            body: dict[str, Any] = {"choices": choices}
            if options.continuous_usage_stats:
                body["usage"] = {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": num_tokens,
                    "total_tokens": prompt_tokens + num_tokens,
                }
            elif options.include_usage:
                body["usage"] = None
            return begin + dumped(body | members)[1:] + b"\n\n"

        try:
            members = self.chat_prompt_ids()
            for index in range(self.job.num_unfinished):
                for first in self.first(index):
                    yield chunk([first], **members)
                    members = {}
            while self.job.num_unfinished:
                for output in await self.job.next_outputs():
                    step = output.output
                    self._note(output)
                    num_tokens += len(step.token_ids)
                    for late in self.late_first(step.index):
                        yield chunk([late])
                    ids = self._ids(step)
                    if options.include_steps:
                        report = step_report(self.tokenizer, output, self.job.hidden_drafters)
                        yield chunk([{**self.delta(step), **ids, "step": report}])
                    elif step.text or self._reports_logprobs(step) or any(ids.values()):
                        yield chunk([{**self.delta(step), **ids}])
                    if step.end is None:
                        continue
                    last = len(self.ends) == len(self.job.times)
                    # With include_usage, a separate last chunk has the counts.
                    members = {} if options.include_usage or not last else self._metrics()
                    ended = {**self.last(step.index, step.end), **self._audit(step.index)}
                    yield chunk([ended], **members)
            if options.include_usage:
                yield chunk([], **self._totals())
        except JobFailed as error:
            yield self.end_with(error.as_api_error())
        else:
            yield _DONE

    def end_with(self, error: ApiError) -> bytes:
        """Record the error that ends the stream, and return the stream's last events."""
        self.error = error
        return self.failed(error)

    def failed(self, error: ApiError) -> bytes:
        """Return the last events of a stream that ends with an error."""
        return event(error.body) + _DONE

    def _ids(self, step: Output) -> dict[str, Any]:
        """Return the fields with the token ids that a step added to a choice, if requested."""
        return {"token_ids": step.token_ids} if self.request.return_token_ids else {}

    def _reports_logprobs(self, step: Output) -> bool:
        """Return whether a step has logprobs that the client requested."""
        requested = self.request.logprobs
        return bool(step.logprobs) and requested is not None and requested is not False

    def _audit(self, index: int) -> dict[str, Any]:
        """Return the field with the audit record of a finished choice, if requested."""
        if not self.request.audit:
            return {}
        end, accepted = self.ends[index], self.job.accepted
        assert accepted is not None, "the engine has accepted the job"
        token_ids, logprobs = self._audited.pop(index)
        record = AuditRecord(
            prompt_token_ids=tuple(self.job.prompts[self.prompt_of(index)]),
            token_ids=tuple(token_ids),
            params=replace(self.job.params, seed=end.seed),
            choice_index=index % self.job.params.n,
            verify_strategy=accepted.verify_strategy,
            logprobs=tuple(logprobs),
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            contract=self.frame["system_fingerprint"].rpartition("-")[2],
            adapter=None if self.job.adapter is None else self.job.adapter[1],
        )
        return {"audit": record.as_dict()}

    def chat_prompt_ids(self) -> dict[str, Any]:
        """Return the field with the token ids of a chat's prompt, if requested."""
        return {}

    def first(self, index: int) -> list[dict[str, Any]]:
        """Return the chunks that begin the stream of a choice."""
        raise NotImplementedError

    def late_first(self, index: int) -> list[dict[str, Any]]:
        """Return chunks to send before a choice's first output that depend on that output."""
        return []

    def delta(self, step: Output) -> dict[str, Any]:
        """Return the chunk that reports what a step added to a choice."""
        raise NotImplementedError

    def last(self, index: int, end: End) -> dict[str, Any]:
        """Return the chunk that ends the stream of a choice."""
        raise NotImplementedError

    def choice(self, output: Output, end: End) -> dict[str, Any]:
        """Return a finished choice for an answer that is not streamed."""
        raise NotImplementedError

    def extras(self) -> dict[str, bytes]:
        """Return optional fields of the answer besides the choices; the values are JSON text."""
        return {}

    def choice_extras(self, index: int) -> dict[str, bytes]:
        """Return optional fields of a choice; the values are JSON text."""
        return {}

    def prompt_of(self, index: int) -> int:
        """Return the index of a choice's prompt."""
        return index // self.job.params.n

    def vllm_prompt_logprobs(self, prompt: int) -> dict[str, bytes]:
        """Return vLLM's field with a prompt's log-probabilities in JSON; empty if not requested."""
        num_alternatives = self.request.prompt_logprobs
        if num_alternatives is None:
            return {}
        logprobs = vllm_prompt_logprobs(
            self.tokenizer, self._prompt_logprobs[prompt], num_alternatives
        )
        return {"prompt_logprobs": logprobs}

    def _totals(self) -> dict[str, Any]:
        n = self.job.params.n
        ends = self.ends
        return {
            "usage": usage(
                prompt_tokens=sum(map(len, self.job.prompts)),
                completion_tokens=sum(end.num_tokens for end in ends.values()),
                # A prompt is counted once, so only its first choice's cache hits count.
                cached_tokens=sum(ends[index].num_cached_tokens for index in sorted(ends)[::n]),
                reasoning_tokens=self._num_reasoning_tokens(),
                stats=self._stats(),
            ),
            **self._metrics(),
        }

    def _num_reasoning_tokens(self) -> int:
        return 0

    def _note(self, output: ChoiceOutput) -> None:
        """Record a finished choice's usage and its prompt's log-probabilities.

        Append the stop string to the text that it ended, if the request asks for that.
        """
        step = output.output
        end = step.end
        if self.request.include_stop_str_in_output and end and end.finish_reason == "stop":
            step.text += end.stop_reason if isinstance(end.stop_reason, str) else ""
        if self.request.audit:
            token_ids, logprobs = self._audited.setdefault(step.index, ([], []))
            token_ids += step.token_ids
            logprobs += step.logprobs
        if step.prompt_logprobs is not None:
            self._prompt_logprobs[self.prompt_of(step.index)] = step.prompt_logprobs
        if step.end is not None and output.span is not None:
            self.ends[step.index] = step.end
            self._spans.append(output.span)

    def _stats(self) -> SpeculativeStats:
        return add_stats([end.stats for end in self.ends.values()])

    def _metrics(self) -> dict[str, Any]:
        num_tokens = sum(end.num_tokens for end in self.ends.values())
        return {
            "metrics": metrics(self._stats(), self.job.num_speculative_tokens),
            "timings": timings(self._spans, num_tokens),
        }


class ChatAnswer(Answer[ChatCompletionRequest]):
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # By choice index; None if an answer is all content.
        self._readers: dict[int, Reader | None] = {}
        self._token_ids: dict[int, list[int]] = {}  # of choices with a reader

    def first(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def delta(self, step: Output) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs:
            logprobs = chat_logprobs(self.tokenizer, step.logprobs)
        delta: dict[str, Any] = {"content": step.text}
        reader = self._reader(step.index)
        if reader is not None:
            delta = self._fields(reader.pieces(step.text))
        return {
            "index": step.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
        }

    def _note(self, output: ChoiceOutput) -> None:
        super()._note(output)
        step = output.output
        if self._reader(step.index) is not None:
            self._token_ids.setdefault(step.index, []).extend(step.token_ids)

    def _reader(self, index: int) -> Reader | None:
        if index not in self._readers:
            self._readers[index] = self._new_reader()
        return self._readers[index]

    def _num_reasoning_tokens(self) -> int:
        """Return the number of tokens up to the end of the reasoning, of all choices."""
        count = 0
        for index, reader in self._readers.items():
            num_bytes = 0 if reader is None else reader.num_reasoning_bytes
            for token_id in self._token_ids[index] if num_bytes else ():
                if num_bytes <= 0:
                    break
                count += 1
                if not self.tokenizer.is_special(token_id):
                    num_bytes -= len(self.tokenizer.token_bytes(token_id))
        return count

    def _reason(self, end: End, num_calls: int) -> str:
        """Return OpenAI's finish reason: "stop", not "tool_calls", if a request named its tool."""
        is_named = isinstance(self.request.tool_choice, NamedTool)
        if num_calls and end.finish_reason == "stop" and not is_named:
            return "tool_calls"
        return end.finish_reason

    def extras(self) -> dict[str, bytes]:
        ids = {name: dumped(value) for name, value in self.chat_prompt_ids().items()}
        return {**self.vllm_prompt_logprobs(0), **ids}

    def chat_prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.job.prompts[0]} if self.request.return_token_ids else {}

    def last(self, index: int, end: End) -> dict[str, Any]:
        reader = self._reader(index)
        delta = {} if reader is None else self._fields(reader.finish())
        num_calls = 0 if reader is None else reader.num_calls
        return {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": self._reason(end, num_calls),
            "stop_reason": end.stop_reason,
            "seed": end.seed,
        }

    def choice(self, output: Output, end: End) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs:
            logprobs = chat_logprobs(self.tokenizer, output.logprobs)
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        reader = self._reader(output.index)
        if reader is not None:
            found = self._fields([*reader.pieces(output.text), *reader.finish()])
            message["content"] = None if found else ""
            for call in found.get("tool_calls", ()):
                del call["index"]
            message |= found
        return {
            "index": output.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._reason(end, 0 if reader is None else reader.num_calls),
            "stop_reason": end.stop_reason,
            "seed": end.seed,
        }

    def _fields(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Return the fields of a message, or of a change of one, that consists of some pieces."""
        message: dict[str, Any] = {}
        for piece in pieces:
            if isinstance(piece, str):
                message["content"] = message.get("content", "") + piece
            elif not isinstance(piece, Reasoning):
                message.setdefault("tool_calls", []).append(piece)
            elif self.request.include_reasoning:
                message["reasoning_content"] = message.get("reasoning_content", "") + piece.text
        return message


class TextAnswer(Answer[CompletionRequest]):
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._logprobs: dict[int, LegacyLogprobs] = {}  # by choice index; tracks offsets
        self._identified: set[int] = set()  # choices whose prompt's token ids were reported

    def _ids(self, step: Output) -> dict[str, Any]:
        ids = super()._ids(step)
        if ids and step.index not in self._identified:  # as vLLM, with the first tokens only
            self._identified.add(step.index)
            ids["prompt_token_ids"] = self.job.prompts[self.prompt_of(step.index)]
        return ids

    def first(self, index: int) -> list[dict[str, Any]]:
        echo = self._echo(index)
        if not echo or self.request.echoes_logprobs:
            return []
        return [self._choice_object(index, echo, None, None)]

    def late_first(self, index: int) -> list[dict[str, Any]]:
        if not self.request.echoes_logprobs or index in self._logprobs:
            return []
        logprobs = self._echoed_logprobs(index, self._builder(index))
        return [self._choice_object(index, self._echo(index), logprobs, None)]

    def delta(self, step: Output) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = self._builder(step.index).build(step.logprobs)
        return self._choice_object(step.index, step.text, logprobs, None)

    def last(self, index: int, end: End) -> dict[str, Any]:
        choice = self._choice_object(index, "", None, end.finish_reason)
        return {**choice, "stop_reason": end.stop_reason, "seed": end.seed}

    def choice(self, output: Output, end: End) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs is not None:
            builder = LegacyLogprobs(self.tokenizer)
            echoed = None
            if self.request.echo:
                echoed = self._echoed_logprobs(output.index, builder)
            logprobs = joined(echoed, builder.build(output.logprobs))
        text = self._echo(output.index) + output.text
        choice = self._choice_object(output.index, text, logprobs, end.finish_reason)
        return {**choice, "stop_reason": end.stop_reason, "seed": end.seed}

    def choice_extras(self, index: int) -> dict[str, bytes]:
        return self.vllm_prompt_logprobs(self.prompt_of(index))

    def _builder(self, index: int) -> LegacyLogprobs:
        return self._logprobs.setdefault(index, LegacyLogprobs(self.tokenizer))

    def _echoed_logprobs(self, index: int, builder: LegacyLogprobs) -> dict[str, Any]:
        prompt = self.prompt_of(index)
        original = self.request.prompts()[prompt]
        return builder.build_prompt(
            self.job.prompts[prompt],
            self._prompt_logprobs[prompt],
            self.request.logprobs or 0,
            text=original if isinstance(original, str) else "",
        )

    def _echo(self, index: int) -> str:
        if not self.request.echo:
            return ""
        prompt = self.request.prompts()[self.prompt_of(index)]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    @staticmethod
    def _choice_object(index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
