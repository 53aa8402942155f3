"""Prompts of random words. A seed gives the same prompts; prompts of two draws begin differently.

A word is one token of most vocabularies, so lengths can be swept. The last words of a drawn text quote earlier ones: a
model that copies continues with the words behind the quoted place, which no other text has there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cachecheck.endpoint import Endpoint

OPENING = "Words:"
QUOTE = 3  # words
WORD_LIST = """
also back band base bath beat bill bird blow blue body bond bone book boom boss both bowl burn bush busy calm came
camp card care cash cell chip club coal cold come cool cope copy core crop dark data date days dear debt deep deny
desk dial diet disc disk door dose down draw drew dual dust ease easy else even exit fact fail fair fall fast fate
feed feet fell file find fine flat flow food foot fort four free from fuel fund gain game gate gave gift give glad
goal goat gold golf good gray grey grow hair half hall hang have head hear heat help here hero high hill hire holy
home hope host hour hunt idea into item join jump keep kick king knee laid lake lane late lead left less like line
link loan lock long lose loss love luck mail main make mark meal mean menu mere mile milk mine miss mode more must
name neck nose only oral over pace page paid pain pair palm pass past peak pick plan play plot plug plus poll poor
port post race rail read real rear rely rent rest rice ring rise risk road rock role roll room rule rush safe said
same seat seed seek seem seen self sell send sent ship shop shot shut side sign skin snow soil sole some sort soul
spot star stay step sure take tale tall tank tape task team tech tell tend test text than that then thin thus time
tiny told toll
"""
WORDS = tuple(WORD_LIST.split())


@dataclass(frozen=True)
class Prompt:
    """A conversation: turns of user and assistant, the last one of the user. Outside of a chat they are one text.

    A chat may begin with an image, a data URL.
    """

    turns: tuple[str, ...]
    endpoint: Endpoint = Endpoint.TEXT
    image: str = ""

    @property
    def words(self) -> list[str]:
        """The words of all turns."""
        return " ".join(self.turns).split()

    @property
    def family(self) -> str:
        """How the prompt begins: those with another beginning share nothing with it."""
        return " ".join(self.turns[0].split()[:6])

    def extended(self, words: Sequence[str]) -> Prompt:
        """Return the prompt with more words at its end."""
        return replace(self, turns=(*self.turns[:-1], f"{self.turns[-1]} {' '.join(words)}"))

    def replied(self, answer: str, words: Sequence[str]) -> Prompt:
        """Return the next prompt of the conversation: after an answer, and with words of the user."""
        return replace(self, turns=(*self.turns, answer, f" {' '.join(words)}"))

    def history(self) -> list[Prompt]:
        """Return the prompts of all turns of the user, the first one first."""
        return [replace(self, turns=self.turns[: i + 1]) for i in range(0, len(self.turns), 2)]


class PromptSource:
    """Draws words and prompts, in an order that follows from a seed."""

    def __init__(self, seed: str, endpoint: Endpoint, factor: int = 1):
        """`factor`: how many times as long texts are as a check asks for."""
        self._random = random.Random(seed)
        self.endpoint = endpoint
        self.factor = factor

    def words(self, num_words: int) -> list[str]:
        """Return so many random words."""
        return self._random.choices(WORDS, k=num_words)

    def quoting(self, num_words: int) -> list[str]:
        """Return random words; the last ones quote some of them."""
        words = self.words(num_words)
        if num_words >= 4 * QUOTE:
            start = self._random.randrange(num_words - 3 * QUOTE)
            words[-QUOTE:] = words[start : start + QUOTE]
        return words

    def prompt(self, num_words: int) -> Prompt:
        """Return a prompt of so many words, times the factor, behind the opening."""
        return self.of(self.quoting(num_words * self.factor))

    def of(self, words: Sequence[str]) -> Prompt:
        """Return the prompt of these words behind the opening."""
        return Prompt((" ".join((OPENING, *words)),), self.endpoint)

    def name(self) -> str:
        """Return a random name, as of a salt."""
        return f"{self._random.getrandbits(64):016x}"
