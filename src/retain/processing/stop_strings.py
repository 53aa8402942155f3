"""Stop strings: the first of several strings that is complete in a text which arrives in parts.

The strings of a request become one automaton (Aho and Corasick, Efficient String Matching, 1975). Its size and the time
to build it are linear in the total length of the strings; the time to search a text is linear in the new text.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request, as an automaton that all of its answers share.

    A state stands for a beginning of a stop string, state 0 for the empty one. After some text the state is the longest
    beginning that the text ends with.
    """

    def __init__(self, strings: Sequence[str] = ()):
        """Raises ValueError for an empty string."""
        if not all(strings):
            raise ValueError("a stop string must not be empty")
        self.following: list[dict[str, int]] = [{}]  # of each state: the state after one more character
        self.lengths = [0]  # of each state, in characters
        self.matches: list[str | None] = [None]  # of each state: the longest stop string that it ends with
        self._strings = [""]  # of each state: a string that begins with it
        for string in strings:
            self._add(string)
        self.fallbacks = self._find_fallbacks()  # of each state: the longest other state that it ends with

    def beginning(self, state: int, max_length: int) -> str:
        """Return the text of a state, its first `max_length` characters."""
        return self._strings[state][: min(self.lengths[state], max_length)]

    def _add(self, string: str) -> None:
        state = 0
        for length, character in enumerate(string, 1):
            if character not in self.following[state]:
                self.following[state][character] = len(self.following)
                self.following.append({})
                self.lengths.append(length)
                self.matches.append(None)
                self._strings.append(string)
            state = self.following[state][character]
        self.matches[state] = string

    def _find_fallbacks(self) -> list[int]:
        fallbacks = [0] * len(self.following)
        states = list(self.following[0].values())
        for state in states:  # shorter ones first; the loop goes on over those that it adds
            for character, longer in self.following[state].items():
                fallback = fallbacks[state]
                while fallback and character not in self.following[fallback]:
                    fallback = fallbacks[fallback]
                fallbacks[longer] = self.following[fallback].get(character, 0)
                self.matches[longer] = self.matches[longer] or self.matches[fallbacks[longer]]
                states.append(longer)
        return fallbacks


class StopStringSearch:
    """Searches one answer for stop strings, and holds back text that may begin one.

    The text held back is the text of the state, so it is kept nowhere else.
    """

    def __init__(self, stop_strings: StopStrings):
        self.found: str | None = None  # the stop string that ends the text
        self._stop_strings = stop_strings
        self._state = 0

    def add(self, text: str, may_stop: bool = True) -> str:
        """Add text that precedes any stop string, and return what is certainly shown.

        A stop string that is complete sets `found`, and is not shown; of several that end at once, the longest. Unless
        the text `may_stop`, those that it completes are text as any other.
        """
        automaton = self._stop_strings
        following = automaton.following
        fallbacks = automaton.fallbacks
        matches = automaton.matches
        state = self._state
        if not state and following[0].keys().isdisjoint(text):  # most text, read by one call
            return text
        for num_read, character in enumerate(text, 1):
            while state and character not in following[state]:
                state = fallbacks[state]
            state = following[state].get(character, 0)
            if may_stop and (found := matches[state]):
                self.found = found
                return self._show(text, automaton.lengths[self._state] + num_read - len(found), 0)
        while state and not following[state]:  # nothing goes on from here
            state = fallbacks[state]
        num_known = automaton.lengths[self._state] + len(text)
        return self._show(text, num_known - automaton.lengths[state], state)

    def flush(self) -> str:
        """End the text, and return what was held back."""
        return self._show("", self._stop_strings.lengths[self._state], 0)

    def _show(self, text: str, num_shown: int, state: int) -> str:
        """Return the first characters of the text held back and of new text; go on from another state."""
        held = self._stop_strings.beginning(self._state, num_shown)
        self._state = state
        return held + text[: num_shown - len(held)]
