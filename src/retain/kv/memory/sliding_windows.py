"""The pages of sliding layers at one position of a text, from where other texts can go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from retain.types import Ints


@dataclass(frozen=True)
class SlidingWindows:
    """The snapshot of a text whose other layers are append-only.

    Pages [G, n] of each sliding layer, from page `first_pages[i]` of the text on; group after group.

    A text can resume from position `min_resume_position` or later. Layer i is of the KV cache group `groups[i]`.
    """

    first_pages: tuple[int, ...]
    pages: tuple[Ints, ...]
    min_resume_position: int
    groups: tuple[int, ...]

    @property
    def ladder_reach(self) -> int:
        """Any position can be kept: rungs are kept themselves."""
        return 0

    @property
    def holds_text(self) -> bool:
        """Its pages are those of rings."""
        return False

    @cached_property
    def page_list(self) -> Ints:
        """All pages, each named once."""
        return np.concatenate([np.zeros(0, np.int32), *(pages.ravel() for pages in self.pages)])

    @property
    def num_pages(self) -> int:
        """The number of pages."""
        return len(self.page_list)

    def before(self, position: int, page_sizes: Sequence[int]) -> SlidingWindows | None:
        """Return the windows at the first position of a block of the text; None where no text can resume there.

        `page_sizes` are those of each group.
        """
        if self.min_resume_position > position:
            return None
        layers = zip(self.pages, self.first_pages, self.groups, strict=True)
        pages = tuple(p[:, : position // page_sizes[g] - first] for p, first, g in layers)
        return replace(self, pages=pages)
