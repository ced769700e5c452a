# SPDX-License-Identifier: Apache-2.0
"""Endpoints that generate: processing from a request's body to its answer.

There are two kinds of requests, chats and completions; bodies of other APIs are converted to chats.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from specops.api.audit import AuditRecord, AuditVerdict, Comparison
from specops.api.contract import with_adapter
from specops.api.errors import ContextOverflow, QueueFull, UnknownAdapter
from specops.api.messages import Capabilities
from specops.api.outputs import PromptLogprobs
from specops.api.sampling_params import SamplingParams
from specops.api.tokenizer import Tokenizer
from specops.server.admission import ClientPermits, Permit
from specops.server.answers import Answer
from specops.server.api_error import (
    ApiError,
    bad_value,
    disconnected,
    restarting,
    server_error,
    shutting_down,
    too_long,
)
from specops.server.audits import (
    AuditRequest,
    bad_record,
    compare,
    records_of,
    require_auditable,
)
from specops.server.call_forms import HERMES
from specops.server.chat import ChatFormat
from specops.server.dispatch import Dispatch
from specops.server.infill import infill_prompt
from specops.server.jobs import BadSpeculation, EngineAway, Job, JobFailed, QueueAway
from specops.server.kv_transfer import kv_transfer_of, session_of
from specops.server.logprobs import check_prompt_logprobs
from specops.server.protocol import (
    MAX_PROMPTS,
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    parse,
)
from specops.server.reasoning import Reader
from specops.server.sampling_defaults import with_defaults
from specops.server.scores import ScoreRequest, check_tokens, scores_of
from specops.server.streaming import ClientGone, EventStream, dumped, until_gone
from specops.server.structured import refusal
from specops.server.tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenized,
    tokenized,
)
from specops.server.unsupported import Policy, names_text

R = TypeVar("R", CompletionRequest, ChatCompletionRequest)
B = TypeVar("B", bound=Body)

logger = logging.getLogger(__name__)

# Bodies of at least this many bytes are parsed in a thread, off the event loop.
_SHORT_BODY = 1 << 15

# A client that sends its whole body before it reads would miss an error if the server closed the
# connection at once. So the server reads on, up to this multiple of the body limit.
_READ_ON = 16

# Maximum number of one client's jobs that wait for acceptance by the engine's thread.
_SUBMITTED = 8

# Texts with fewer characters are tokenised on the event loop: a thread would cost more.
_SHORT_TEXT = 4096


class Generation:
    """Common part of the endpoints: reads bodies, tokenises, submits jobs and sends answers."""

    def __init__(
        self,
        dispatch: Dispatch,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        *,
        max_body_bytes: int,
        body_timeout: float,
        sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
        shares_caches: bool = False,
        model_aliases: Sequence[str] = (),
        unsupported_fields: Policy = "error",
    ) -> None:
        # Each name once, first the one that answers report.
        capabilities = dispatch.capabilities
        self.model_names = list(dict.fromkeys((capabilities.model_name, *model_aliases)))
        self._unsupported_fields = unsupported_fields
        self._sampling_defaults = sampling_defaults
        # Rejected drafts of these drafters may be text of another client, so they are not reported.
        self._hidden_drafters = frozenset(
            drafter["name"]
            for drafter in capabilities.drafters
            if shares_caches and drafter["learns"]
        )
        self._dispatch = dispatch
        self._tokenizer = tokenizer
        self._chat_format = chat_format
        self._can_chat = _marks_turns(chat_format)
        # Without a known format of calls, use HERMES; require_tools refuses requests with tools
        # later.
        self._call_form = chat_format.call_form or HERMES
        self._submitting = ClientPermits(_SUBMITTED)
        self._max_body_bytes = max_body_bytes
        self._body_timeout = body_timeout
        self._created = int(time.time())
        # A longer text cannot fit the context, and tokenising it would take seconds. The factor
        # of 4 allows for tokenizers that shorten a text first.
        self._max_characters = 4 * capabilities.max_model_len * tokenizer.longest_token()

    @property
    def _capabilities(self) -> Capabilities:
        return self._dispatch.capabilities

    @property
    def contract(self) -> dict[str, Any]:
        """The engine's execution contract."""
        return self._capabilities.contract

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model's answers: the version and the digest of the contract."""
        return self._fingerprint(None)

    def _fingerprint(self, adapter: tuple[str, str] | None) -> str:
        """Return the fingerprint of the answers of an adapter, given as for `Job`."""
        contract = with_adapter(self.contract, None if adapter is None else adapter[1])
        return f"specops-{contract['specops']}-{contract['digest']}"

    def model_cards(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models: one for each name of the model and each adapter."""
        return list(map(self.model_card, (*self.model_names, *self._dispatch.adapters)))

    def model_card(self, name: str) -> dict[str, Any]:
        """Return the entry of a name of the model, or of a LoRA adapter.

        Raises:
            ApiError: 404; neither has this name.
        """
        is_adapter = self.adapter_of(name) is not None
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "specops",
            "max_model_len": self._capabilities.max_model_len,
            "has_chat_template": self._chat_format.has_template,
            "can_chat": self._can_chat,
            "methods": self._capabilities.methods,
            "drafters": self._capabilities.drafters,
            "speculative_config": self._capabilities.speculative_config,
            **({"parent": self.model_names[0]} if is_adapter else {}),
        }

    def contract_of(self, name: str | None) -> dict[str, Any]:
        """Return the execution contract of requests that name a model or an adapter.

        Raises:
            ApiError: 404; nothing served has this name.
        """
        adapter = self._adapter_of(name)
        return with_adapter(self.contract, None if adapter is None else adapter[1])

    def _adapter_of(self, name: str | None) -> tuple[str, str] | None:
        """Return the name and the digest of the adapter that a request's `model` names.

        Raises:
            ApiError: 404; nothing served has this name.
        """
        adapter = self.adapter_of(name)
        return None if adapter is None else (adapter, self._dispatch.adapters[adapter])

    def adapter_of(self, name: str | None) -> str | None:
        """Return the LoRA adapter that a request's `model` names; None for the model itself.

        Raises:
            ApiError: 404; nothing served has this name.
        """
        if name is None or name in self.model_names:
            return None
        if name not in self._dispatch.adapters:
            served = ", ".join(map(repr, (*self.model_names, *self._dispatch.adapters)))
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server serves {served}",
                param="model",
                code="model_not_found",
            )
        return name

    async def answer(
        self,
        http: Request,
        body_type: type[B],
        begin: Callable[[B, str], tuple[R, Callable[..., Answer[R]]]],
    ) -> Response:
        """Serve one request: read its body, run it, and return its answer or a stream of it.

        Args:
            http: the HTTP request.
            body_type: class of its body.
            begin: maps the body and the client's name to the chat or completion to generate and
                the factory of its `Answer`.
        """
        self._require_capacity(http)
        body = with_defaults(await self.read(http, body_type), self._sampling_defaults)
        try:
            request, answer_type = begin(body, http.state.client)
            self._note_unread(http, request, body_type.chat_names)
            return await self._answer(http, request, answer_type)
        except ApiError as error:
            raise error.under_names(body_type.chat_names) from None

    async def _answer(
        self, http: Request, request: Any, answer_type: Callable[..., Answer[Any]]
    ) -> Response:
        adapter = self._adapter_of(request.model)
        self._check_lengths(request)
        params = await self._with_prediction(await self._sampling_params(http, request))
        params = self._with_budget(request, params)
        texts = self._prompts(request)
        params = self._after_reasoning(request, texts[0], params)
        prompts = await self._encode(request, texts)
        check_prompt_logprobs(prompts, params)
        if http.state.is_gone():  # stop before the engine works for it
            raise ClientDisconnect
        speculative = request.speculative_config
        kv_transfer = kv_transfer_of(request, len(prompts), self._capabilities.role)
        if request.audit and kv_transfer is not None and kv_transfer.do_remote_decode:
            message = "audit must be absent with do_remote_decode: another server generates"
            raise ApiError(400, message, param="audit", code="invalid_value")
        job = Job(
            prompts,
            params,
            None if speculative is None else json.dumps(speculative),
            client=http.state.client,
            streaming=request.stream,
            unread=self._dispatch.unread,
            kv_transfer=kv_transfer,
            session=session_of(request, len(prompts), self._capabilities.has_sessions, adapter),
            hidden_drafters=self._hidden_drafters,
            adapter=adapter,
        )
        answer = answer_type(
            request,
            job,
            self._tokenizer,
            self._capabilities.model_name if adapter is None else adapter[0],
            self._fingerprint(adapter),
            partial(self._reader, request, texts[0]),
        )
        http.state.record.answer = answer
        try:
            await until_gone(self._submit(job, http.state.permit), http.receive)
            # Weights may have been updated while the job waited.
            answer.frame["system_fingerprint"] = self._fingerprint(adapter)
            if request.audit:
                try:
                    require_auditable(job.accepted)
                except ApiError:
                    self._dispatch.abort(job)
                    raise
            if request.stream:
                close = partial(self._dispatch.abort, job)
                return EventStream(answer.chunks(), close, failed=answer.end_with)
            body = await until_gone(answer.complete(http.state.permit), http.receive)
            return Response(body, media_type="application/json")
        except ClientGone:
            return Response(status_code=499)  # for the access log only: the client has left
        except (ValueError, QueueFull, JobFailed, asyncio.CancelledError) as error:
            raise _refusal(error, request) from None
        finally:
            if not request.stream:
                self._dispatch.abort(job)  # no-op if it is finished

    async def count(
        self, http: Request, body_type: type[B], as_chat: Callable[[B], ChatCompletionRequest]
    ) -> int:
        """Return the number of prompt tokens of a chat, which `as_chat` makes from the body."""
        body = await self.read(http, body_type)
        try:
            chat = as_chat(body)
            self.adapter_of(chat.model)
            self._note_unread(http, chat, body_type.chat_names)
            chat.output_format(self._call_form)  # refuses what generation would refuse
            return len((await self._encode(chat, self._prompts(chat)))[0])
        except ApiError as error:
            raise error.under_names(body_type.chat_names) from None

    async def audit(self, http: Request) -> Response:
        """Serve /v1/audit: derive answers again, one after the other, and compare all bits."""
        self._require_capacity(http)
        request = await self.read(http, AuditRequest)
        self.adapter_of(request.model)
        records = await asyncio.to_thread(records_of, request, self._capabilities)
        verdicts, salt = [], uuid4().hex
        try:
            for index, record in enumerate(records):
                audited = self._audited(http, index, record, salt)
                verdict = await until_gone(audited, http.receive)
                self._dispatch.metrics.audited(verdict.is_confirmed)
                message = verdict.sentence(self._shown_token)
                verdicts.append({**verdict.as_dict(), "message": message})
        except ClientGone:
            return Response(status_code=499)  # for the access log only: the client has left
        except (QueueFull, JobFailed, asyncio.CancelledError) as error:
            raise _refusal(error, request) from None
        answer = {"object": "audit", "model": self._capabilities.model_name}
        answer["system_fingerprint"] = self.fingerprint
        return JSONResponse({**answer, "verdicts": verdicts})

    async def _audited(
        self, http: Request, index: int, record: AuditRecord, cache_salt: str
    ) -> AuditVerdict:
        """Return the verdict on one record.

        Raises:
            ApiError: the engine refuses the record's request.
            QueueFull: too many requests wait.
            JobFailed: the engine has failed.
        """
        adapters = {digest: name for name, digest in self._dispatch.adapters.items()}
        if record.adapter is not None and record.adapter not in adapters:
            loaded = ", ".join(adapters) or "none"
            message = f"adapter must be the digest of a loaded adapter ({loaded})"
            raise bad_record(index, ValueError(f"{message}, got {record.adapter}"))
        job = Job(
            [list(record.prompt_token_ids)],
            record.request(cache_salt),
            json.dumps(record.speculation(self._capabilities.max_num_drafts)),
            client=http.state.client,
            streaming=True,
            unread=self._dispatch.unread,
            choice_index=record.choice_index,
            adapter=None if record.adapter is None else (adapters[record.adapter], record.adapter),
        )
        try:
            await self._submit(job, http.state.permit)
            return await compare(job, Comparison(record, self.contract["digest"]))
        except (ContextOverflow, ValueError) as error:
            raise bad_record(index, error) from None
        finally:
            self._dispatch.abort(job)  # no-op if it is finished

    async def score(self, http: Request) -> Response:
        """Serve /v1/score: report the logprobs of continuations of a prompt."""
        self._require_capacity(http)
        request = await self.read(http, ScoreRequest)
        adapter = self._adapter_of(request.model)
        prompt, continuations = await self._encode_scored(request)
        check_tokens(prompt, continuations)
        prompts = [prompt + one for one in continuations]
        try:
            mode = self.contract["logprobs_mode"]
            params = request.sampling_params(len(prompt), http.state.cache_scope, mode)
        except ValueError as error:
            raise bad_value(error, ScoreRequest) from None
        check_prompt_logprobs(prompts, params)
        job = Job(
            prompts,
            params,
            '{"method": "naive"}',
            client=http.state.client,
            streaming=False,
            unread=self._dispatch.unread,
            adapter=adapter,
        )
        found: dict[int, PromptLogprobs] = {}
        try:
            await until_gone(self._submit(job, http.state.permit), http.receive)
            fingerprint = self._fingerprint(adapter)
            while job.num_unfinished:
                for output in await until_gone(job.next_outputs(), http.receive):
                    assert output.output.prompt_logprobs is not None, "the job requests them"
                    found[output.output.index] = output.output.prompt_logprobs
        except ClientGone:
            return Response(status_code=499)  # for the access log only: the client has left
        except (ValueError, QueueFull, JobFailed, asyncio.CancelledError) as error:
            raise _refusal(error, request) from None
        finally:
            self._dispatch.abort(job)  # no-op if it is finished
        model = self._capabilities.model_name if adapter is None else adapter[0]
        answer = {"object": "score", "model": model}
        answer["system_fingerprint"] = fingerprint
        scored = partial(scores_of, len(prompt), found, has_alternatives=request.logprobs > 0)
        body = await asyncio.to_thread(lambda: dumped(answer | scored()))
        return Response(body, media_type="application/json")

    async def _encode_scored(self, request: ScoreRequest) -> tuple[list[int], list[list[int]]]:
        """Return the token ids of the prompt and of its continuations."""
        texts = request.texts(self._capabilities.max_model_len, self._max_characters)

        def encode() -> list[list[int]]:
            encoded = []
            for index, text in enumerate(texts):
                name = "continuations" if index else "prompt"
                if isinstance(text, str):
                    text = self._tokenizer.encode(text, add_special_tokens=not index)
                self._tokenizer.check_ids(name, text, self._capabilities.vocab_size)
                encoded.append(text)
            return encoded

        try:
            prompt, *continuations = await asyncio.to_thread(encode)
        except ValueError as error:
            raise bad_value(error, ScoreRequest) from None
        return prompt, continuations

    def _shown_token(self, token_id: int) -> str:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return f"{token_id} ({text!r})"

    def _require_capacity(self, http: Request) -> None:
        """Refuse a request before any work for it if its client may not submit another one.

        Raises:
            ApiError: 429; too many of its requests wait.
        """
        try:
            self._dispatch.require_capacity(http.state.client)
        except QueueFull as error:
            raise busy(error) from None

    async def _submit(self, job: Job, permit: Permit) -> None:
        """Submit a job to the engine; release the permit once fewer than _SUBMITTED jobs wait."""
        while self._dispatch.is_paused:  # without the permit, which /resume needs
            permit.release()
            await self._dispatch.until_resumed()
            await permit.acquire()
        if job.params.structured_output is not None:  # the engine compiles its grammar first
            permit.release()
            return await self._dispatch.submit(job)
        submission = Permit(self._submitting, job.client)
        await submission.acquire()
        permit.release()
        try:
            await self._dispatch.submit(job)
        finally:
            submission.release()

    async def read(self, http: Request, body_type: type[B]) -> B:
        """Read and parse the body of a request, then wait for the request's permit.

        Raises:
            ApiError: the body is invalid, too long, or arrives too slowly.
            ClientDisconnect: the client left before the end of the body.
        """
        http.state.permit.release()
        try:
            body = await asyncio.wait_for(self._read_body(http), self._body_timeout)
        except asyncio.TimeoutError:  # another class than TimeoutError until Python 3.11
            raise ApiError(
                408,
                f"the body must arrive within {self._body_timeout:g} seconds",
                code="body_too_slow",
                headers={"Connection": "close"},
            ) from None
        await http.state.permit.acquire()
        ignored: list[str] | None = None if self._unsupported_fields == "error" else []
        read = partial(parse, body_type, body, self._capabilities.max_model_len, ignored)
        parsed = read() if len(body) < _SHORT_BODY else await asyncio.to_thread(read)
        if ignored and self._unsupported_fields == "warn":
            names = names_text(ignored)
            logger.warning("%s: ignored unsupported fields: %s", http.url.path, names)
            http.state.ignored_fields = ignored
        return parsed

    def _note_unread(self, http: Request, request: Any, names: Mapping[str, str]) -> None:
        """Name, in the answer's header, the fields of a chat that its template does not read."""
        if self._unsupported_fields == "ignore" or not isinstance(request, ChatCompletionRequest):
            return
        unread = request.unread(self._chat_format.variables)
        if self._thinking_budget(request) is not None and not self._can_limit_thinking:
            unread.append("thinking.budget_tokens")
        if unread:
            ignored = getattr(http.state, "ignored_fields", [])
            http.state.ignored_fields = ignored + [names.get(name, name) for name in unread]

    @cached_property
    def _can_limit_thinking(self) -> bool:
        """True if the chat template can start the thinking, and one token can end it."""
        if not self._chat_format.variables & {"enable_thinking", "thinking"}:
            return False
        return len(self._tokenizer.encode("</think>", add_special_tokens=False)) == 1

    @staticmethod
    def _thinking_budget(request: ChatCompletionRequest) -> int | None:
        """Return Anthropic's maximum number of thinking tokens; None if the request has none."""
        thinking = request.thinking
        return thinking.budget_tokens if thinking and thinking.type == "enabled" else None

    def _with_budget(self, request: Any, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the thinking budget, unless they limit the thinking.

        Raises:
            ApiError: the budget conflicts with another parameter.
        """
        if not isinstance(request, ChatCompletionRequest) or not self._can_limit_thinking:
            return params
        budget = self._thinking_budget(request)
        if budget is None or params.reasoning_max_tokens is not None:
            return params
        try:
            return replace(params, reasoning_max_tokens=budget)
        except ValueError as error:  # a thinking that nothing ends, with a constrained format
            raise bad_value(error, type(request)) from None

    async def tokenize(self, http: Request) -> Response:
        """Serve /tokenize."""
        request = await self.read(http, TokenizeRequest)
        self.adapter_of(request.model)
        if (request.prompt is None) == (request.messages is None):
            got = "neither" if request.prompt is None else "both"
            raise ApiError(
                400, f"exactly one of prompt and messages must be set, got {got}", param="prompt"
            )
        if request.messages is not None:
            try:
                text = self._chat_format.render(
                    [message.for_template() for message in request.messages],
                    add_generation_prompt=request.begins_answer,
                    continue_final_message=request.continue_final_message,
                    variables=request.chat_template_kwargs,
                )
            except ValueError as error:
                raise bad_value(error, TokenizeRequest, "messages") from None
        else:
            assert request.prompt is not None
            text = request.prompt
        with_special = request.add_special_tokens and request.messages is None
        try:
            answer = await asyncio.to_thread(
                tokenized,
                self._tokenizer,
                text,
                add_special_tokens=with_special,
                max_model_len=self._capabilities.max_model_len,
                strings=request.return_token_strs,
            )
        except ValueError as error:
            raise bad_value(error, TokenizeRequest, "prompt") from None
        return JSONResponse(answer)

    async def detokenize(self, http: Request) -> Response:
        """Serve /detokenize."""
        request = await self.read(http, DetokenizeRequest)
        self.adapter_of(request.model)
        try:
            answer = await asyncio.to_thread(
                detokenized, self._tokenizer, request.tokens, self._capabilities.vocab_size
            )
        except ValueError as error:
            raise bad_value(error, DetokenizeRequest) from None
        return JSONResponse(answer)

    async def _read_body(self, http: Request) -> bytes:
        """Return the body; raise ApiError if its headers are invalid or it exceeds the limit."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Browsers let pages of other origins send some other types without a preflight request.
            raise ApiError(415, f"Content-Type must be application/json, got {kind or 'none'}")
        codings = http.headers.getlist("transfer-encoding")
        if any(coding.strip().lower() != "chunked" for coding in codings):
            got = ", ".join(codings)
            raise ApiError(400, f"Transfer-Encoding must be chunked, got {got}")
        self._check_announced(http)
        chunks: list[bytes] = []
        size = 0
        async for chunk in http.stream():
            size += len(chunk)
            if size <= self._max_body_bytes:
                chunks.append(chunk)
            elif size > _READ_ON * self._max_body_bytes:
                break
        if size > self._max_body_bytes:
            raise self._too_large()
        return b"".join(chunks)

    def _check_announced(self, http: Request) -> None:
        """Refuse a body whose announced length exceeds the limit, before it arrives."""
        length = int(http.headers.get("content-length", 0))
        if length > self._max_body_bytes:
            # If the client sends the body anyway, read and drop it, so that the client reads the
            # error. A client that sent "Expect" may omit the body, so the connection cannot be
            # reused.
            waits = "expect" in http.headers
            raise self._too_large(closes=waits or length > _READ_ON * self._max_body_bytes)

    def _too_large(self, *, closes: bool = False) -> ApiError:
        return ApiError(
            413,
            f"the body must be at most {self._max_body_bytes} bytes long",
            code="body_too_large",
            headers={"Connection": "close"} if closes else None,
        )

    def _check_lengths(self, request: CompletionRequest | ChatCompletionRequest) -> None:
        """Refuse lists of more token ids than fit the context, before the ids are examined."""
        prompt = request.prompt if isinstance(request, CompletionRequest) else None
        if not isinstance(prompt, list):
            return
        for ids in [prompt, *prompt[:MAX_PROMPTS]]:
            is_ids = isinstance(ids, list) and bool(ids) and type(ids[0]) is int
            if is_ids and len(ids) > self._capabilities.max_model_len:
                raise too_long(
                    f"a prompt of {len(ids)} tokens exceeds the context of "
                    f"{self._capabilities.max_model_len} tokens",
                    request.prompt_field,
                )

    async def _sampling_params(
        self, http: Request, request: CompletionRequest | ChatCompletionRequest
    ) -> SamplingParams:
        """Return the sampling parameters; those of a long body are checked in a thread."""
        scope = http.state.cache_scope
        if int(http.headers.get("content-length", _SHORT_BODY)) < _SHORT_BODY:
            return request.sampling_params(self._call_form, scope)
        return await asyncio.to_thread(request.sampling_params, self._call_form, scope)

    async def _with_prediction(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the predicted text encoded as tokens."""
        text = params.prediction
        if not isinstance(text, str) or not text:
            return params
        if len(text) > self._max_characters:
            raise ApiError(
                400,
                f"prediction must fit the context of {self._capabilities.max_model_len} tokens, "
                f"got {len(text)} characters",
                param="prediction",
                code="invalid_value",
            )
        encode = partial(self._tokenizer.encode, text, add_special_tokens=False)
        ids = encode() if len(text) < _SHORT_TEXT else await asyncio.to_thread(encode)
        return replace(params, prediction=tuple(ids))

    def _reader(self, request: Any, prompt: Any) -> Reader | None:
        """Return a new parser of the answer to a request; None if the answer is all content."""
        if not isinstance(request, ChatCompletionRequest):
            return None
        return self._chat_format.reader(prompt, request.schemas)

    def _after_reasoning(self, request: Any, prompt: Any, params: SamplingParams) -> SamplingParams:
        """Return parameters whose constraint applies to the text after the reasoning of a chat.

        With a limit of the thinking, the engine applies the constraint after it.
        """
        form = params.structured_output
        if form is None or params.thinks or not isinstance(request, ChatCompletionRequest):
            return params
        prefix = self._chat_format.reasoning_prefix(prompt, calls=request.may_call)
        if prefix is None:
            return params
        return replace(params, structured_output=replace(form, prefix=prefix))

    def _prompts(self, request: CompletionRequest | ChatCompletionRequest) -> list[str | list[int]]:
        """Return the prompts of a request, each a text or a list of token ids."""
        if isinstance(request, ChatCompletionRequest):
            try:
                if request.uses_tools:
                    self._chat_format.require_tools()
                text = self._chat_format.render(
                    [message.for_template() for message in request.messages],
                    add_generation_prompt=request.begins_answer,
                    continue_final_message=request.continue_final_message,
                    variables=request.template_variables(),
                    tools=[tool.model_dump(exclude_none=True) for tool in request.tools],
                )
            except ValueError as error:
                raise bad_value(error, ChatCompletionRequest, "messages") from None
            return [text]
        if request.suffix is None:
            return request.prompts()
        try:
            return [infill_prompt(self._tokenizer, request.prompt, request.suffix)]
        except ValueError as error:
            code = "unsupported_parameter"
            raise ApiError(400, str(error), param="suffix", code=code) from None

    async def _encode(
        self, request: CompletionRequest | ChatCompletionRequest, prompts: list[str | list[int]]
    ) -> list[list[int]]:
        """Return the token ids of the prompts of a request."""
        for prompt in prompts:
            if isinstance(prompt, str) and len(prompt) > self._max_characters:
                raise too_long(
                    f"a prompt of {len(prompt)} characters exceeds the context of "
                    f"{self._capabilities.max_model_len} tokens",
                    request.prompt_field,
                )
        is_plain = isinstance(request, CompletionRequest)  # a template writes special tokens itself

        def encode() -> list[list[int]]:
            encoded = [
                self._tokenizer.encode(prompt, add_special_tokens=is_plain)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]
            for token_ids in encoded:
                self._tokenizer.check_ids("prompt", token_ids, self._capabilities.vocab_size)
            return encoded

        try:
            if sum(map(len, prompts)) < _SHORT_TEXT:
                return encode()
            return await asyncio.to_thread(encode)
        except ValueError as error:
            raise ApiError(
                400, str(error), param=request.prompt_field, code="invalid_value"
            ) from None


def _marks_turns(chat_format: ChatFormat) -> bool:
    """Return whether the chat template marks turns, which a model needs to answer.

    A template without marks, which only joins the messages, serves models that cannot chat.
    """
    text = "Hello"
    try:
        return chat_format.render([{"role": "user", "content": text}]).strip() != text
    except ValueError:  # there is no template, or it refuses a user's message alone
        return chat_format.has_template


def _refusal(error: BaseException, request: Any) -> ApiError:
    """Return the API error for an exception that refused a job or ended it early."""
    if isinstance(error, ContextOverflow):
        return too_long(str(error), request.prompt_field)
    if isinstance(error, QueueFull):
        return busy(error)
    if isinstance(error, UnknownAdapter):  # it was unloaded while the request was read
        return ApiError(404, str(error), param="model", code="model_not_found")
    if isinstance(error, BadSpeculation):
        return ApiError(400, str(error), param="speculative_config", code="invalid_value")
    if isinstance(error, ValueError):
        if str(error).startswith(("structured_output:", "structured_output needs the package")):
            return refusal(error, request.form_field)
        return bad_value(error, type(request))
    if isinstance(error, asyncio.CancelledError):  # the time for draining is over
        return shutting_down()
    if isinstance(error, JobFailed):
        return failure_of(error)
    return server_error(str(error))


def failure_of(error: JobFailed) -> ApiError:
    """Return the API error for a command that the engine could not execute."""
    if isinstance(error, EngineAway):
        return restarting(str(error))
    if isinstance(error, QueueAway):
        return disconnected(str(error))
    return server_error(str(error))


def busy(error: QueueFull) -> ApiError:
    """Return the API error for a request that must be sent again later."""
    return ApiError(
        429,
        f"the server is busy: {error}",
        type="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": "1"},
    )
