"""The header that names what was left out stays short, whatever a request has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from retain.server.warning_header import WARNING_HEADER, build_warning_header, warn_of


@given(st.lists(st.text(min_size=1, max_size=300), max_size=40))
def test_a_warning_is_one_short_line(names: list[str]) -> None:
    header = build_warning_header(warn_of("tools", names))
    assert list(header) == ([WARNING_HEADER] if names else [])
    for text in header.values():
        assert len(text) < 2000 and text.isascii() and text.isprintable() and text.startswith("tools left out: ")


def test_names_are_distinct_and_counted() -> None:
    assert warn_of("items", ["a", "b", "a"]) == ["items left out: a, b"]
    (warning,) = warn_of("tools", (f"x{i}" for i in range(1000)))
    assert warning.endswith("x15, and 984 more")
