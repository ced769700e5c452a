# SPDX-License-Identifier: Apache-2.0
"""Answers of APIs in which an answer is a list of blocks: texts, and calls of tools.

What is generated is a chat's one choice. The whole answer and the stream are made of the same
changes, so both have the same blocks.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specops.server.answers import ChatAnswer
from specops.server.jobs import ChoiceOutput, JobFailed
from specops.server.logprobs import chat_logprobs
from specops.server.streaming import dumped
from specops.service.messages import Output


@dataclass
class TextBlock:
    """A piece of text between calls, as far as it has come; cut where it might have gone on."""

    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False


@dataclass
class CallBlock:
    """A call of a tool; `arguments` are JSON."""

    id: str
    name: str
    arguments: str


Block = TextBlock | CallBlock


@dataclass
class Change:
    """What happens to the last block: it begins, its text grows, or it is complete.

    Attributes:
        kind: which of these.
        block: as it is afterwards.
        text, logprobs: that a text has grown by.
    """

    kind: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class BlockAnswer(ChatAnswer):
    """Collects the blocks of one choice."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocks: list[Block] = []
        self._is_open = False  # the last block is a text that may grow

    def begin(self) -> Iterator[bytes]:
        """The events that a stream begins with."""
        raise NotImplementedError

    def change(self, index: int, change: Change) -> Iterator[bytes]:
        """The events of what happens to block `index`."""
        raise NotImplementedError

    def finish(self, end: str) -> Iterator[bytes]:
        """The events that a stream ends with; `end` is a chat's `finish_reason`."""
        raise NotImplementedError

    def reply(self, end: str) -> dict[str, Any]:
        """The whole answer."""
        raise NotImplementedError

    def whole_reply(self, end: str) -> bytes:
        """Return the whole answer in JSON."""
        return dumped(self.reply(end))

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
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
            yield self.failed(error.as_api_error())

    def _render(self, outputs: Mapping[int, ChoiceOutput]) -> bytes:
        for _ in self._changes(outputs[0].output):
            pass
        return self.whole_reply(self._why())

    def _why(self) -> str:
        """Why the answer ended, as a chat has it; calls that were demanded by name are a reason."""
        reason = self._ends[0].finish_reason
        has_called = any(isinstance(block, CallBlock) for block in self.blocks)
        return "tool_calls" if has_called and reason == "stop" else reason

    def _changes(self, step: Output) -> Iterator[Change]:
        """What a step does to the blocks, one change after the other."""
        logprobs = []
        if self.request.logprobs:
            logprobs = chat_logprobs(self.tokenizer, step.logprobs)["content"]
        for piece in self._pieces(step):
            if isinstance(piece, str):
                yield from self._grow(piece, logprobs)
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

    def _pieces(self, step: Output) -> Iterator[str | dict[str, Any]]:
        """What of the text a step makes certain: texts, and calls."""
        if not self.request.may_call:
            if step.text or step.logprobs:
                yield step.text
            return
        reader = self._reader(0)
        yield from reader.pieces(step.text)
        if step.end is not None and (left := reader.finish()):
            yield left

    def _grow(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Change]:
        if not self._is_open:
            self.blocks.append(TextBlock())
            self._is_open = True
            yield Change("begin", self.blocks[-1])
        block = self.blocks[-1]
        assert isinstance(block, TextBlock)
        block.text += text
        block.logprobs += logprobs
        yield Change("grow", block, text, logprobs)

    def _close(self, *, is_cut: bool = False) -> Iterator[Change]:
        if self._is_open:
            block = self.blocks[-1]
            assert isinstance(block, TextBlock)
            self._is_open, block.is_cut = False, is_cut
            yield Change("end", block)
