# SPDX-License-Identifier: Apache-2.0
"""Wire format of messages: a length of four bytes, then MessagePack, which is data and not code."""

import socket
import struct
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import Struct

from specops.api.messages import (
    Abort,
    Batch,
    Begin,
    Fetched,
    Hello,
    KvTransfer,
    LoadAdapter,
    NoEngine,
    Overdue,
    Stop,
    Submit,
    UnloadAdapter,
)
from specops.api.outputs import PromptLogprobs
from specops.api.sampling_params import SamplingParams
from specops.api.structured import StructuredOutput

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


class Peer(Struct, array_like=True, frozen=True):
    """Host from which pages may be fetched, with the range of its ports.

    Attributes:
        host: name or address, exactly as requests write it.
        first, last: first and last port of the range, inclusive.
    """

    host: str
    first: int
    last: int


class RoleSettings(Struct, array_like=True, frozen=True):
    """Settings of an engine's KV transfer.

    Attributes:
        role: "prefill", "decode" or "mixed".
        host, port: address on which its transport listens; port 0 chooses a free one. Rank `i` of
            several listens on `port + i`.
        peers: addresses from which it may fetch pages.
        lease_seconds: maximum time for which pages wait for their reader.
        lease_bytes: maximum number of bytes of waiting pages.
        transport: "tcp" or "nixl".
    """

    role: str
    host: str
    port: int
    peers: list[Peer]
    lease_seconds: float
    lease_bytes: int
    transport: str


class SessionSettings(Struct, array_like=True, frozen=True):
    """Settings of an engine's sessions.

    Attributes:
        directory: directory of their files.
        max_bytes: maximum total size of the files.
    """

    directory: str
    max_bytes: int


class KvEventSettings(Struct, array_like=True, frozen=True):
    """Settings of the publisher of an engine's prefix cache events.

    Attributes:
        endpoint: ZeroMQ endpoint that the engine binds and publishes on.
        topic: topic of the messages.
        replay: endpoint for requests of missed messages; empty for none.
    """

    endpoint: str
    topic: str
    replay: str


class Setup(Struct, tag=True, array_like=True):
    """First message to a process: the configuration of its engine.

    Attributes:
        settings: argument of `EngineConfig.from_plain`.
        log_level: level of its log, which goes to standard error.
        rank: tensor-parallel rank of the process.
        store: file of the `FileStore` by which ranks connect; empty if the first rank chooses it.
        role: settings of KV transfer; None for none.
        kv_events: settings of prefix cache events; None for none.
        data_parallel_rank: rank of the engine among the engines of one frontend; None for a single
            engine.
        log_format: format of its log; one of `logs.FORMATS`.
        sessions: settings of sessions; None for none.
    """

    settings: dict[str, Any]
    log_level: str
    rank: int = 0
    store: str = ""
    role: RoleSettings | None = None
    kv_events: KvEventSettings | None = None
    data_parallel_rank: int | None = None
    log_format: str = "text"
    sessions: SessionSettings | None = None


class StepCommands(Struct, tag=True, array_like=True):
    """Message to another rank: the commands that the first rank took before a step.

    Attributes:
        commands: concatenated commands in wire format.
    """

    commands: bytes


class GrammarReady(Struct, tag=True, array_like=True):
    """Command in `StepCommands`: the first rank has compiled the grammar of a job."""

    job: int


def _message_class(cls: type, **types: Any) -> type[Struct]:
    """Return a message class with the fields of a dataclass; messages omit default values.

    Args:
        cls: the dataclass, which validates its values. Receivers need not validate them again.
        types: message classes of fields that hold dataclasses.
    """
    hints = get_type_hints(cls) | types
    listed = [(field.name, hints[field.name], field.default) for field in fields(cls)]
    return msgspec.defstruct(cls.__name__, listed, omit_defaults=True)


def _values(source: Any, cls: type) -> dict[str, Any]:
    return {field.name: getattr(source, field.name) for field in fields(cls)}


def _restored(message: Any, cls: type[T]) -> T:
    result = object.__new__(cls)
    result.__dict__.update(_values(message, cls))
    return result


_Form = _message_class(StructuredOutput)
_Params = _message_class(SamplingParams, structured_output=_Form | None)


def _params_message(params: SamplingParams) -> Struct:
    values = _values(params, SamplingParams)
    if params.structured_output is not None:
        form = _Form(**_values(params.structured_output, StructuredOutput))
        values["structured_output"] = form
    return _Params(**values)


def _params(message: Any) -> SamplingParams:
    if message.structured_output is not None:
        message.structured_output = _restored(message.structured_output, StructuredOutput)
    return _restored(message, SamplingParams)


class _Submit(Struct, tag="Submit", array_like=True):
    job: int
    client: str
    prompts: list[list[int]]
    params: _Params  # type: ignore[valid-type]
    speculative_config: str | None
    streaming: bool
    kv_transfer: KvTransfer | None = None
    session: str | None = None
    adapter: tuple[str, str] | None = None
    choice_index: int = 0


def packed(value: Any) -> Any:
    """Convert a value that MessagePack cannot encode to one that it can."""
    if isinstance(value, PromptLogprobs):
        return value.packed()
    raise TypeError(f"cannot encode {type(value).__name__} for an engine's socket")


def unpacked(kind: type, value: Any) -> Any:
    """Convert a value from the form of `packed` back."""
    assert kind is PromptLogprobs
    return PromptLogprobs.unpacked(value)


_Other = (
    Setup
    | Begin
    | Abort
    | LoadAdapter
    | UnloadAdapter
    | Fetched
    | Overdue
    | Stop
    | StepCommands
    | GrammarReady
)
ToProcess = _Other | Submit
FromProcess = Hello | NoEngine | Batch

_encoder = msgspec.msgpack.Encoder(enc_hook=packed)
_to_process = msgspec.msgpack.Decoder(_Other | _Submit)
_from_process = msgspec.msgpack.Decoder(FromProcess, dec_hook=unpacked)


def encoded(message: ToProcess | FromProcess) -> bytes:
    """Return a message in wire format.

    Raises:
        ValueError: a text in it is invalid Unicode.
    """
    if isinstance(message, Submit):
        body: Any = _Submit(
            message.job,
            message.client,
            message.prompts,
            _params_message(message.params),
            message.speculative_config,
            message.streaming,
            message.kv_transfer,
            message.session,
            message.adapter,
            message.choice_index,
        )
    else:
        body = message
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(body, buffer, _LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return bytes(buffer)


def to_process(body: memoryview) -> Any:
    """Decode a `ToProcess` message."""
    message = _to_process.decode(body)
    if isinstance(message, _Submit):
        return Submit(
            message.job,
            message.client,
            message.prompts,
            _params(message.params),
            message.speculative_config,
            message.streaming,
            message.kv_transfer,
            message.session,
            message.adapter,
            message.choice_index,
        )
    return message


def from_process(body: memoryview) -> FromProcess:
    """Decode a `FromProcess` message."""
    message: FromProcess = _from_process.decode(body)
    return message


class Frames:
    """Splitter of a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """Add bytes; yield the messages now complete, each valid only until the next one."""
        self._buffer += data
        begin = 0
        with memoryview(self._buffer) as view:
            while len(view) - begin >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, begin)
                end = begin + _LENGTH.size + length
                if end > len(view):
                    break
                with view[begin + _LENGTH.size : end] as body:
                    yield body
                begin = end
        del self._buffer[:begin]


def receive(connection: socket.socket, frames: Frames, flags: int = 0) -> Iterator[memoryview]:
    """Receive bytes once, and yield the messages that they complete.

    Raises:
        BlockingIOError: no bytes are available, and `flags` has MSG_DONTWAIT.
        EOFError: the other end is closed.
    """
    data = connection.recv(_READ_BYTES, flags)
    if not data:
        raise EOFError
    yield from frames.feed(data)
