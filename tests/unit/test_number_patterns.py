"""Patterns of numbers in a range: a number matches exactly where it is within."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from retain.processing.schemas.number_patterns import integer_pattern, magnitude_pattern

BOUNDS = st.none() | st.integers(-1200, 1200) | st.integers(-(2**80), 2**80) | st.sampled_from([10**99, 3**200])


@st.composite
def numbers_near(draw: st.DrawFn, *bounds: int | None) -> int:
    near = [b for b in bounds if b is not None] or [0]
    return draw(st.sampled_from(near)) + draw(st.sampled_from([-10, -2, -1, 0, 1, 2, 9, 10, 90, 99])) * draw(
        st.sampled_from([1, 10, 1000, -1])
    )


def matches(pattern: str | None, text: str) -> bool:
    return pattern is not None and re.fullmatch(pattern, text) is not None


@given(BOUNDS, BOUNDS, st.data())
@example(None, None, None)
def test_integers_match_where_they_are_in_the_range(low: int | None, high: int | None, data: st.DataObject) -> None:
    pattern = integer_pattern(low, high)
    some = [0, 1, -1, *range(-30, 1300, 7), *(b for b in (low, high) if b is not None)]
    for number in [*some, *([data.draw(numbers_near(low, high)) for _ in range(5)] if data else [])]:
        is_within = (low is None or low <= number) and (high is None or number <= high)
        assert matches(pattern, str(number)) == is_within, number
        assert not matches(pattern, f"0{abs(number)}") and not matches(pattern, f"{number}.0")
    assert not matches(pattern, "-0") and not matches(pattern, "")
    assert (pattern is None) == (low is not None and high is not None and low > high)


@given(st.integers(0, 2**80), st.none() | st.integers(0, 2**80), st.booleans(), st.booleans(), st.data())
def test_numbers_match_where_they_are_in_the_range(
    low: int, high: int | None, excludes_low: bool, excludes_high: bool, data: st.DataObject
) -> None:
    pattern = magnitude_pattern(low, excludes_low, high, excludes_high)
    for number in (low, high or 0, *(abs(data.draw(numbers_near(low, high))) for _ in range(5))):
        for fraction in ("", ".0", ".00", ".5", ".001"):
            is_above = number > low or (number == low and (not excludes_low or fraction.strip(".0")))
            is_whole_high = number == high and not fraction.strip(".0") and not excludes_high
            is_below = high is None or number < high or is_whole_high
            assert matches(pattern, f"{number}{fraction}") == bool(is_above and is_below), (number, fraction)
