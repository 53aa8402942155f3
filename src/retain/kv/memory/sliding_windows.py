"""The pages of sliding layers at one position of a text, from where other texts can go on."""

from __future__ import annotations

from dataclasses import dataclass

from retain.types import Ints


@dataclass(frozen=True)
class SlidingWindows:
    """Pages [G, n] of each sliding layer, from page `first_pages[i]` of the text on.

    A text can resume from position `min_resume_position` or later.
    """

    first_pages: tuple[int, ...]
    pages: tuple[Ints, ...]
    min_resume_position: int

    def before_page(self, page: int, page_size: int) -> SlidingWindows | None:
        """Return the windows at the first position of a page of the text; None where no text can resume there."""
        if self.min_resume_position > page * page_size:
            return None
        pages = tuple(p[:, : page - first] for p, first in zip(self.pages, self.first_pages, strict=True))
        return SlidingWindows(self.first_pages, pages, self.min_resume_position)
