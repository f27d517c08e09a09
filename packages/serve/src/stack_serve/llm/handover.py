"""Copies of cached pages between engines: one engine computes the keys of a prompt, and another one continues it.

The receiving engine registers the pages in its prefix cache, where its scheduler finds them like the pages of an
earlier prompt. Pages that are missing are computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stack_core.abi.generation import GenerationRequest
from stack_serve.llm.page_copies import HANDOVER_PAGES
from stack_serve.llm.pages import extend_digests
from stack_serve.llm.programs import Programs
from stack_serve.llm.scheduler_state import SchedulerState

__all__ = ["ExportedPages", "export_pages", "import_pages"]

T = TypeVar("T")


@dataclass(frozen=True)
class ExportedPages:
    """Copies of the first pages of a prompt.

    Attributes:
      pages: number of pages.
      blocks: for each `HANDOVER_PAGES` pages, one array [HANDOVER_PAGES, entries] for each dtype of the pools.
    """

    pages: int
    blocks: Sequence[tuple[Any, ...]]


def export_pages(
    state: SchedulerState, programs: Programs, request: GenerationRequest, adapter: int | None
) -> ExportedPages:
    """Launches copies of the cached pages of a prompt; to be called between two steps.

    Args:
      adapter: number of the request's adapter in this engine; None for the base model.
    """
    pages = state.pool.find(_digests(state, request, adapter))
    return ExportedPages(len(pages), [programs.export_pages(block) for block in _blocks(pages)])


def import_pages(
    state: SchedulerState,
    programs: Programs,
    request: GenerationRequest,
    adapter: int | None,
    exported: ExportedPages,
) -> None:
    """Writes another engine's pages to free pages and registers them. The caller runs no step meanwhile.

    One page stays free for each running sequence, which may need a page in its next step.
    """
    digests = _digests(state, request, adapter)[: exported.pages]
    found = state.pool.find(digests)
    # Held meanwhile, because `take` may evict unreferenced pages.
    state.pool.share(found)
    count = min(len(digests) - len(found), max(state.pool.available - len(state.running), 0))
    pages = found + [state.pool.take() for _ in range(count)]
    # Pages that were found keep their contents, which running sequences may share.
    targets = [None] * len(found) + pages[len(found) :]
    for block, arrays in zip(_blocks(targets), exported.blocks, strict=False):
        programs.import_pages(block, arrays)
    for page, digest in zip(pages, digests, strict=False):
        state.pool.register(page, digest)
    state.pool.release(pages)


def _digests(state: SchedulerState, request: GenerationRequest, adapter: int | None) -> list[bytes]:
    """Computes the page digests of a prompt without its last token, which is computed in any case."""
    digests: list[bytes] = []
    options = {"page_tokens": state.page_tokens, "adapter": adapter, "images": request.images}
    extend_digests(digests, request.prompt, pages=(len(request.prompt) - 1) // state.page_tokens, **options)
    return digests


def _blocks(pages: Sequence[T]) -> list[Sequence[T]]:
    return [pages[start : start + HANDOVER_PAGES] for start in range(0, len(pages), HANDOVER_PAGES)]
