"""Task `ruler`: five kinds of questions about facts hidden in essays, each asked together with the document.

After RULER (Hsieh et al., arXiv 2404.06654): one number, one of many, several numbers of one name, of several names,
and variables that get their value from each other. Prompts are raw text; one document has the facts of all kinds.
"""

from __future__ import annotations

import random
from pathlib import Path

from retain.bench.documents import Document, Question, measure
from retain.bench.tasks import load_essays
from retain.llm import LLM

__all__ = ["METRICS", "REQUESTS_PER_ITEM", "load_items", "measure"]

METRICS = ("mean", "single", "multikey", "multivalue", "multiquery", "tracking")
REQUESTS_PER_ITEM = 5
NAMES = (
    *("amber", "basil", "cedar", "dahlia", "ember", "falcon", "ginger", "heron", "indigo", "jasper", "kestrel"),
    *("lotus", "maple", "nectar", "onyx", "pepper", "quartz", "raven", "saffron", "tulip", "umber", "velvet"),
)
NUM_SINGLE_KEYS = 8  # of which one question wants one, another one four
FACT_TOKENS = 20  # about, of one fact


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[Document]:
    """Return documents of about `max_prompt_len` tokens with their questions."""
    essays = load_essays(llm, data)
    return [_make_document(llm, essays, max_prompt_len, random.Random(i)) for i in range(num_items)]


def _make_document(llm: LLM, essays: list[int], length: int, rng: random.Random) -> Document:
    facts, puzzles = make_puzzles(rng)
    room = max(length - FACT_TOKENS * len(facts) - 60, 1)
    start = rng.randrange(max(len(essays) - room, 1))
    sentences = llm.tokenizer.decode(essays[start : start + room]).split(". ")
    places = sorted(rng.randrange(len(sentences) + 1) for _ in facts)
    for place, fact in zip(reversed(places), reversed(facts), strict=True):  # variables keep their order
        sentences.insert(place, fact)
    encode = llm.tokenizer.encode
    questions = (
        Question(kind, encode(f"{question}\n{begun}", add_special_tokens=False), tuple((a,) for a in answers))
        for kind, question, begun, answers in puzzles
    )
    return Document(llm.encode(". ".join(sentences) + ".\n\n"), tuple(questions))


def make_puzzles(rng: random.Random) -> tuple[list[str], list[tuple[str, str, str, list[str]]]]:
    """Return facts, and of each kind a question, how its answer begins, and the strings that the answer must have."""
    names = rng.sample(NAMES, NUM_SINGLE_KEYS + 2)
    codes = {name: str(rng.randrange(10_000, 100_000)) for name in names[:NUM_SINGLE_KEYS]}
    many, word = names[NUM_SINGLE_KEYS:]
    values = [str(rng.randrange(10_000, 100_000)) for _ in range(4)]
    secret = str(rng.randrange(10_000, 100_000))
    start = str(rng.randrange(10_000, 100_000))
    variables = ["".join(rng.sample("ABCDEFGHKLMNPRSTUVWXYZ", 4)) for _ in range(4)]
    facts = [f"The code of {name} is {code}" for name, code in codes.items()]
    facts += [f"One of the prices of {many} is {value}" for value in values]
    facts += [f"The secret number of the {word} is {secret}. Remember it: {secret}"]
    rng.shuffle(facts)
    links = [f"Let {a} = {b}" for a, b in zip(variables, [start, *variables], strict=False)]
    for i, link in enumerate(links):  # in their order, anywhere among the others
        facts.insert(rng.randrange(facts.index(links[i - 1]) + 1 if i else 0, len(facts) + 1), link)
    asked = rng.sample(list(codes), 5)
    listed = ", ".join(asked[1:])
    return facts, [
        ("single", f"What is the secret number of the {word}?", f"The secret number of the {word} is", [secret]),
        ("multikey", f"What is the code of {asked[0]}?", f"The code of {asked[0]} is", [codes[asked[0]]]),
        ("multivalue", f"Which four prices of {many} does the text name?", f"The prices of {many} are", values),
        (
            "multiquery",
            f"What are the codes of {listed}?",
            f"The codes of {listed} are, in this order:",
            [codes[a] for a in asked[1:]],
        ),
        (
            "tracking",
            f"Which four variables have the value {start}, their own or another variable's?",
            "The four variables are",
            variables,
        ),
    ]
