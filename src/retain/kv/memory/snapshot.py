"""What a text needs beside its append-only pages to go on from a position."""

from __future__ import annotations

from typing import Protocol

from retain.types import Ints


class Snapshot(Protocol):
    """Pages that a position of a text needs beside those of the blocks before it. The holder counts each page once.

    Pages are held by reference: a row copies a page that a snapshot holds before it writes into it.
    """

    @property
    def min_resume_position(self) -> int:
        """The first position at which a text can go on with it; the last is where it was taken."""

    @property
    def ladder_reach(self) -> int:
        """Tokens of the text behind it before which no other can be taken: it stands for a rung among them."""

    @property
    def holds_text(self) -> bool:
        """Whether its pages are those of the text, without which it is of no use."""

    @property
    def page_list(self) -> Ints:
        """All pages, each named once."""

    @property
    def num_pages(self) -> int:
        """The number of pages."""
