"""Host-side state of one continuation of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

from stack_core.abi.generation import PromptImage
from stack_core.text.image_prompts import position_shift

__all__ = ["Sequence"]


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A prompt and the generated tokens of one continuation, modified only by the scheduler once it has arrived.

    Invariants:
      computed_tokens <= total_tokens = len(tokens) + in_flight <= max_total_tokens
      len(pages) * page_tokens >= computed_tokens
      slot is None if and only if it is not running; then pages is empty and computed_tokens is 0

    Attributes:
      id: unique number of the sequence.
      request_id: id of the request.
      index: index of the continuation within the request.
      tokens: prompt tokens and the generated tokens read back so far.
      prompt_tokens: number of prompt tokens.
      max_total_tokens: maximum total length of prompt and continuation.
      priority: priority of the request, lowest first; the scheduler clips it to its bounds.
      arrival: unique arrival number.
      turn: scheduling key, lowest first; ties are broken by arrival.
      adapter: number of the adapter; None means the base model.
      cacheable: True if the prompt may use the prefix cache; False if prompt log-probabilities are requested.
      is_constrained: True if the next token can be sampled only after the host has read the previous one.
      images: images of the prompt in order.
      leader: first continuation of the request; this one waits for its prompt in order to share the pages.
      computed_tokens: number of tokens whose keys and values are in the pages after all planned steps.
      in_flight: number of tokens sampled by planned steps but not yet read by the host.
      slot: slot of a running sequence, otherwise None.
      adapter_slot: slot of the adapter while the sequence is running; -1 without an adapter.
      pages: page numbers in token order; pages shared with other sequences are read-only.
      cached_tokens: number of prompt tokens found in the prefix cache at the first start.
      preemptions: number of times the sequence lost its pages.
      prompt_planned: True if earlier steps compute the full prompt; stays True after a preemption.
      ended: True if the sequence is finished.
      digests: digests of the full pages, computed on demand.
      registered_pages: number of leading pages registered in the prefix cache.
      weights_version: scheduler's weights version at admission; pages are registered only while it is current.
    """

    id: int
    request_id: str
    index: int
    tokens: list[int]
    prompt_tokens: int
    max_total_tokens: int
    priority: int
    arrival: int
    turn: int = 0
    adapter: int | None = None
    cacheable: bool = True
    is_constrained: bool = False
    images: tuple[PromptImage, ...] = ()
    leader: Sequence | None = None
    computed_tokens: int = 0
    in_flight: int = 0
    slot: int | None = None
    adapter_slot: int = -1
    pages: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0
    prompt_planned: bool = False
    ended: bool = False
    digests: list[bytes] = field(default_factory=list)
    registered_pages: int = 0
    weights_version: int = 0

    @property
    def total_tokens(self) -> int:
        """Number of tokens after all planned steps."""
        return len(self.tokens) + self.in_flight

    def image_boundary(self, end: int) -> int:
        """Returns the start of the image that contains both sides of place `end` and is not causal, otherwise `end`."""
        images = (image for image in self.images if image.layout == "whole")
        return next((image.start for image in images if image.start < end < image.end), end)

    def position_shift(self, place: int) -> int:
        """Returns the difference between a place outside of images and the position of its token."""
        return position_shift(self.images, place)
