# SPDX-License-Identifier: Apache-2.0
"""Answers of APIs in which an answer is a list of blocks: reasoning, texts and tool calls.

The engine generates the single choice of a chat. The complete answer and the stream are made from
the same changes, so both have the same blocks.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specops.api.messages import Output
from specops.server.answers import ChatAnswer
from specops.server.jobs import ChoiceOutput, JobFailed
from specops.server.logprobs import chat_logprobs
from specops.server.reasoning import Piece, Reasoning
from specops.server.streaming import dumped


@dataclass
class TextBlock:
    """Text before, between or after calls; `is_cut`: its finish reason is not "stop"."""

    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False


@dataclass
class ReasoningBlock:
    """Reasoning before a text or a call; `is_cut` as for a text."""

    text: str = ""
    is_cut: bool = False


@dataclass
class CallBlock:
    """Tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


GrowingBlock = TextBlock | ReasoningBlock
Block = GrowingBlock | CallBlock


@dataclass
class Change:
    """Change of an answer's last block: the block begins, its text grows, or it is complete.

    Attributes:
        kind: kind of the change.
        block: the block after the change.
        text, logprobs: additions to a text that grows.
    """

    kind: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class BlockAnswer(ChatAnswer):
    """Answer that collects the blocks of one choice."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocks: list[Block] = []
        self._is_open = False  # whether the last block may grow

    def begin(self) -> Iterator[bytes]:
        """Yield the events that begin a stream."""
        raise NotImplementedError

    def change(self, index: int, change: Change) -> Iterator[bytes]:
        """Yield the events of a change of block `index`."""
        raise NotImplementedError

    def finish(self, end: str) -> Iterator[bytes]:
        """Yield the events that end a stream; `end` is a chat's `finish_reason`."""
        raise NotImplementedError

    def reply(self, end: str) -> dict[str, Any]:
        """Return the complete answer."""
        raise NotImplementedError

    def complete_reply(self, end: str) -> bytes:
        """Return the complete answer in JSON."""
        return dumped(self.reply(end))

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events."""
        for event in self.begin():
            yield event
        try:
            while self.job.num_unfinished:
                for output in await self.job.next_outputs():
                    self._note(output)
                    for change in self._changes(output.output):
                        for event in self.change(len(self.blocks) - 1, change):
                            yield event
            for event in self.finish(self._why()):
                yield event
        except JobFailed as error:
            yield self.end_with(error.as_api_error())

    def _render(self, outputs: Mapping[int, ChoiceOutput]) -> bytes:
        for _ in self._changes(outputs[0].output):
            pass
        return self.complete_reply(self._why())

    def _why(self) -> str:
        """Return the finish reason: "tool_calls" if the answer has a call and ended regularly.

        That includes calls of the function that `tool_choice` names.
        """
        reason = self.ends[0].finish_reason
        has_called = any(isinstance(block, CallBlock) for block in self.blocks)
        return "tool_calls" if has_called and reason == "stop" else reason

    def _changes(self, step: Output) -> Iterator[Change]:
        """Apply a step's output to the blocks, and yield the changes in order."""
        logprobs = []
        if self.request.logprobs:
            logprobs = chat_logprobs(self.tokenizer, step.logprobs)["content"]
        for piece in self._pieces(step):
            if isinstance(piece, Reasoning):
                yield from self._grow(ReasoningBlock, piece.text, [])
            elif isinstance(piece, str):
                yield from self._grow(TextBlock, piece, logprobs)
                logprobs = []
            else:
                yield from self._close()
                called = piece["function"]
                block = CallBlock(piece["id"], called["name"], called["arguments"])
                self.blocks.append(block)
                yield Change("begin", block)
                yield Change("end", block)
        if step.end is not None:
            yield from self._close(is_cut=step.end.finish_reason != "stop")

    def _pieces(self, step: Output) -> Iterator[Piece]:
        """Yield the texts, reasoning and calls that a step has made final."""
        reader = self._reader(0)
        if reader is None:
            if step.text or step.logprobs:
                yield step.text
            return
        yield from reader.pieces(step.text)
        if step.end is not None:
            yield from reader.finish()

    def _grow(
        self, kind: type[GrowingBlock], text: str, logprobs: list[dict[str, Any]]
    ) -> Iterator[Change]:
        if self._is_open and not isinstance(self.blocks[-1], kind):
            yield from self._close()
        if not self._is_open:
            self.blocks.append(kind())
            self._is_open = True
            yield Change("begin", self.blocks[-1])
        block = self.blocks[-1]
        assert not isinstance(block, CallBlock)
        block.text += text
        if isinstance(block, TextBlock):
            block.logprobs += logprobs
        yield Change("grow", block, text, logprobs)

    def _close(self, *, is_cut: bool = False) -> Iterator[Change]:
        if self._is_open:
            block = self.blocks[-1]
            assert not isinstance(block, CallBlock)
            self._is_open = False
            block.is_cut = is_cut
            yield Change("end", block)
