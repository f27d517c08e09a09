"""Answers as lists of blocks: text, reasoning and tool calls in the order of generation."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from stack_core.abi.generation import GenerationUpdate
from stack_core.text.message_parsers import MessageDelta
from stack_serve.openai.chat import ChatSerializer

__all__ = ["Block", "BlockWriter", "event"]


def event(kind: str, **members: Any) -> bytes:
    """Returns a server-sent event whose data repeats its type."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **members}))


@dataclass
class Block:
    """A part of an answer.

    Attributes:
      place: index among the blocks of the answer.
      call: number of the tool call, if it is one.
      call_id, name: id of the tool call and name of its function.
      parts: text so far; the JSON text of the arguments for a call.
    """

    kind: Literal["content", "reasoning", "call"]
    place: int
    call: int = 0
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockWriter(ChatSerializer):
    """Serializer of chat answers for interfaces that describe an answer as blocks; the request has one continuation.

    Attributes:
      blocks: blocks so far.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocks: list[Block] = []

    @abstractmethod
    def start_events(self) -> Iterator[bytes]:
        """Yields the events that precede the first block."""

    @abstractmethod
    def block_start(self, block: Block) -> Iterator[bytes]:
        """Yields the events that begin a block."""

    @abstractmethod
    def block_delta(self, block: Block, text: str) -> bytes:
        """Returns the event that appends to a block."""

    @abstractmethod
    def block_stop(self, block: Block) -> Iterator[bytes]:
        """Yields the events that end a block."""

    def chunk(self, prompt: int, update: GenerationUpdate) -> Iterator[bytes]:
        """Yields the events of an update."""
        number = self.note(prompt, update)
        choice = self.choices[number]
        first, choice.begun = not choice.begun, True
        if first:
            yield from self.start_events()
        self.read(number, update)
        for delta in self.deltas:
            yield from self._grow(delta)
        if update.finish_reason is not None and self.blocks:
            yield from self.block_stop(self.blocks[-1])

    def add(self, prompt: int, update: GenerationUpdate) -> None:
        """Stores an update for the complete answer."""
        self.read(self.note(prompt, update), update)
        for delta in self.deltas:
            if not self._continues(delta):
                self.blocks.append(self._new(delta))
            self.blocks[-1].parts.append(delta.text)

    def _grow(self, delta: MessageDelta) -> Iterator[bytes]:
        if not self._continues(delta):
            if self.blocks:
                yield from self.block_stop(self.blocks[-1])
            self.blocks.append(self._new(delta))
            yield from self.block_start(self.blocks[-1])
        block = self.blocks[-1]
        block.parts.append(delta.text)
        if delta.text:
            yield self.block_delta(block, delta.text)

    def _continues(self, delta: MessageDelta) -> bool:
        block = self.blocks[-1] if self.blocks else None
        return block is not None and (block.kind, block.call) == (delta.kind, delta.call)

    def _new(self, delta: MessageDelta) -> Block:
        block = Block(delta.kind, len(self.blocks), delta.call)
        if delta.name is not None:
            block.call_id, block.name = self.call_id(delta.call), delta.name
        return block
