# SPDX-License-Identifier: Apache-2.0
"""Messages on a socket: a length of four bytes, and then MessagePack. Nothing on it is code."""

import socket
import struct
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import Struct

from specops.engine.outputs import PromptLogprobs
from specops.engine.sampling_params import SamplingParams
from specops.engine.structured import StructuredOutput
from specops.service.messages import (
    Abort,
    Batch,
    Begin,
    Fetched,
    Hello,
    KvTransfer,
    NoEngine,
    Overdue,
    Stop,
    Submit,
)

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


class Peer(Struct, array_like=True, frozen=True):
    """A host that pages are fetched from, and the range of its ports.

    Attributes:
        host: a name or an address, as requests spell it.
        first, last: the ports.
    """

    host: str
    first: int
    last: int


class RoleSettings(Struct, array_like=True, frozen=True):
    """How an engine hands prompts over.

    Attributes:
        role: "prefill", "decode" or "mixed".
        host, port: where its transport listens; port 0: any free one. Rank `i` of several listens
            `i` ports further.
        peers: addresses that it fetches pages from.
        lease_seconds: that pages wait for their reader.
        lease_bytes: most bytes of pages that wait.
        transport: "tcp" or "nixl".
    """

    role: str
    host: str
    port: int
    peers: list[Peer]
    lease_seconds: float
    lease_bytes: int
    transport: str


class KvEventSettings(Struct, array_like=True, frozen=True):
    """Where an engine tells what its prefix cache has.

    Attributes:
        endpoint: of ZeroMQ, which it binds and publishes on.
        topic: of its messages.
        replay: where who has missed messages asks for them; empty: nowhere.
    """

    endpoint: str
    topic: str
    replay: str


class Setup(Struct, tag=True, array_like=True):
    """The first message to a process: what its engine is made of.

    Attributes:
        settings: as `EngineConfig.from_plain` takes them.
        log_level: of its log, which goes to standard error.
        rank: of several that compute one model, which one it is.
        store: the file by which these meet; empty: the first one chooses it.
        role: of an engine that hands prompts over, or gets them; None: neither.
        kv_events: where it tells what its prefix cache has; None: nowhere.
        data_parallel_rank: of the engine among those behind one door; None: it is the only one.
    """

    settings: dict[str, Any]
    log_level: str
    rank: int = 0
    store: str = ""
    role: RoleSettings | None = None
    kv_events: KvEventSettings | None = None
    data_parallel_rank: int | None = None


class Taken(Struct, tag=True, array_like=True):
    """To another rank: what the first one has taken before a step.

    Attributes:
        commands: messages, as they go over a socket.
    """

    commands: bytes


class GrammarReady(Struct, tag=True, array_like=True):
    """Among these: the first rank has compiled the grammar of a job."""

    job: int


def _twin(cls: type, **types: Any) -> type[Struct]:
    """A message with the fields of a dataclass; those that have their default are left out.

    Args:
        cls: the dataclass, which checks its values. Those that were checked once need not be again.
        types: of fields that are such dataclasses themselves.
    """
    hints = get_type_hints(cls) | types
    listed = [(one.name, hints[one.name], one.default) for one in fields(cls)]
    return msgspec.defstruct(cls.__name__, listed, omit_defaults=True)


def _values(source: Any, cls: type) -> dict[str, Any]:
    return {one.name: getattr(source, one.name) for one in fields(cls)}


def _restored(message: Any, cls: type[T]) -> T:
    made = object.__new__(cls)
    made.__dict__.update(_values(message, cls))
    return made


_Form = _twin(StructuredOutput)
_Params = _twin(SamplingParams, structured_output=_Form | None)


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


def packed(value: Any) -> Any:
    """What MessagePack takes in the place of a value that it does not know."""
    if isinstance(value, PromptLogprobs):
        return value.packed()
    raise TypeError(f"{type(value).__name__} does not cross the door")


def unpacked(kind: type, value: Any) -> Any:
    """The value that `packed` has packed."""
    assert kind is PromptLogprobs
    return PromptLogprobs.unpacked(value)


ToProcess = Setup | Begin | Submit | Abort | Fetched | Overdue | Stop | Taken | GrammarReady
FromProcess = Hello | NoEngine | Batch

_encoder = msgspec.msgpack.Encoder(enc_hook=packed)
_to_process = msgspec.msgpack.Decoder(
    Setup | Begin | _Submit | Abort | Fetched | Overdue | Stop | Taken | GrammarReady
)
_from_process = msgspec.msgpack.Decoder(FromProcess, dec_hook=unpacked)


def encoded(message: ToProcess | FromProcess) -> bytes:
    """A message as it goes over a socket.

    Raises:
        ValueError: it has a text that is no Unicode.
    """
    if isinstance(message, Submit):
        body: Any = _Submit(
            *(message.job, message.client, message.prompts, _params_message(message.params)),
            *(message.speculative_config, message.streaming, message.kv_transfer),
        )
    else:
        body = message
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(body, buffer, _LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return bytes(buffer)


def to_process(body: memoryview) -> Any:
    """Reads a `ToProcess`."""
    message = _to_process.decode(body)
    if isinstance(message, _Submit):
        return Submit(
            *(message.job, message.client, message.prompts, _params(message.params)),
            *(message.speculative_config, message.streaming, message.kv_transfer),
        )
    return message


def from_process(body: memoryview) -> FromProcess:
    """Reads a `FromProcess`."""
    message: FromProcess = _from_process.decode(body)
    return message


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """Adds bytes; yields the messages that are whole now, each to be read at once."""
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
    """The messages that are whole with the next bytes.

    Raises:
        BlockingIOError: there are none yet, and `flags` has MSG_DONTWAIT.
        EOFError: the other end is closed.
    """
    data = connection.recv(_READ_BYTES, flags)
    if not data:
        raise EOFError
    yield from frames.feed(data)
