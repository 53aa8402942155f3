"""Grammars of JSON schemas with integers that llguidance would round (see large_integers.py), in its dialect of Lark.

A part with such an integer in it becomes rules, and its numbers regular expressions; any other part stays a JSON schema
within the grammar. What such a part cannot be combined with is refused, with its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

from retain.processing.schemas.disjointness import exclude_each_other, kind_of, matches_type
from retain.processing.schemas.embedding import embed
from retain.processing.schemas.json_schema import TYPES, list_of
from retain.processing.schemas.large_integers import (
    NUMERIC,
    find_parts_with_large_integers,
    has_large_bound,
    has_large_integer,
)
from retain.processing.schemas.number_patterns import integer_pattern, magnitude_pattern
from retain.processing.schemas.parts import Part, SchemaError, iter_places, open_root
from retain.processing.schemas.refusals import NO_VALUE, OVERLAP, check_keywords

OF_ARRAYS = ("additionalItems", "items", "maxItems", "minItems", "prefixItems")
OF_OBJECTS = (
    "additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties", "required",
)  # fmt: skip
OF_STRINGS = ("format", "maxLength", "minLength", "pattern")
UNIONS = ("allOf", "anyOf", "oneOf")
KEYWORDS = (*NUMERIC, *OF_ARRAYS, *OF_OBJECTS, *OF_STRINGS, *UNIONS, "$ref", "const", "enum", "type")
INTEGER = "an integer beyond 2^53"
TOO_LARGE = f"the schema is too large for {INTEGER}"
MAX_ALTERNATIVES = 64  # of `oneOf`
MAX_MEMBERS = 256  # that follow each other in a value: llguidance recurses through their rules, and its stack ends
MAY_BE_LARGE = re.compile("[0-9]{16}|[0-9]e")  # in the text of a schema: most have no such number
SMALL = 2**52  # numbers up to this one are left to llguidance
COMMON_RULES = r"""ws: WS?
WS: /[ \n\r\t]+/
NAME: /"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/"""


def build_exact_grammar(schema: dict[str, Any]) -> str | None:
    """Return the text of a grammar that begins with the rule `start`; None where llguidance rounds nothing.

    Raises SchemaError.
    """
    if not MAY_BE_LARGE.search(json.dumps(schema)):
        return None
    root = open_root(schema)
    exact = find_parts_with_large_integers(root)
    if id(schema) not in exact:
        return None
    check_keywords(root)
    return _ExactGrammar(root, exact).build()


class _ExactGrammar:
    """Writes the rules of a schema, one for each of its parts with large integers or beside one."""

    def __init__(self, root: Part, exact: set[int]):
        """`exact`: ids of the parts with large integers."""
        self._root = root
        self._exact = exact
        self._names: dict[int, str] = {}  # of the rules, by the id of a part
        self._queue: list[Part] = []
        self._rules: list[str] = []
        self._num_characters = 0
        self._max_characters = 2**16 + 8 * len(json.dumps(root.schema))

    def build(self) -> str:
        """Return the grammar."""
        self._add("start", self._rule(self._root))
        while self._queue:
            part = self._queue.pop()
            self._add(self._names[id(part.schema)], self._expression(part))
        return "\n".join([*self._rules, COMMON_RULES])

    def _add(self, name: str, expression: str) -> None:
        self._num_characters += len(expression)
        if self._num_characters > self._max_characters:
            raise SchemaError(self._root.place, TOO_LARGE)
        self._rules.append(f"{name}: {expression}")

    def _new_rule(self, expression: str) -> str:
        name = f"r{len(self._rules)}"
        self._add(name, expression)
        return name

    def _rule(self, part: Part) -> str:
        """Return the name of the rule of a part."""
        if id(part.schema) not in self._names:
            self._names[id(part.schema)] = f"p{len(self._names)}"
            self._queue.append(part)
        return self._names[id(part.schema)]

    def _inner(self, part: Part, schema: Any, *tokens: object) -> str | None:
        """Return what matches a schema within a part; None for one that nothing matches."""
        if schema is False:
            return None
        return self._rule(part.enter(schema, *tokens)) if isinstance(schema, dict) else _json({})

    def _is_exact(self, *schemas: Any) -> bool:
        return any(id(schema) in self._exact for schema in schemas)

    def _expression(self, part: Part) -> str:
        if not self._is_exact(part.schema):
            return _json(embed(part))
        used = {name for name in KEYWORDS if name in part.schema}
        for name in ("$ref", "allOf", "anyOf", "oneOf"):
            if name in used:
                return self._combine(part, name, used - {name})
        if "const" in used or "enum" in used:
            return self._choose(part)
        return self._by_type(part)

    def _combine(self, part: Part, keyword: str, others: set[str]) -> str:
        """Return the expression of a part that refers to another, or that is made of several."""
        if keyword == "$ref":
            target = part.follow(part.schema["$ref"])
            if target is None or others:
                raise SchemaError(part.place.at("$ref"), f"{INTEGER} beside `$ref` is not supported")
            return self._rule(target)
        inner = list_of(part.schema[keyword])
        if others or (keyword == "allOf" and len(inner) != 1):
            raise SchemaError(part.place.at(keyword), f"{INTEGER} in or beside `{keyword}` is not supported here")
        parts = [part.enter(schema, keyword, i) for i, schema in enumerate(inner) if isinstance(schema, dict)]
        if keyword == "oneOf" and not (len(parts) == len(inner) and _are_disjoint(parts)):
            raise SchemaError(part.place.at(keyword), OVERLAP)
        found = [self._inner(part, schema, keyword, i) for i, schema in enumerate(inner)]
        return self._any_of(part, [rule for rule in found if rule])

    def _any_of(self, part: Part, alternatives: Sequence[str]) -> str:
        if not alternatives:
            raise SchemaError(part.place, NO_VALUE)
        return " | ".join(alternatives)

    def _choose(self, part: Part) -> str:
        """Return the expression of constants. Numbers are compared here, other constants by llguidance."""
        siblings = {k: v for k, v in part.schema.items() if k in KEYWORDS and k not in ("const", "enum", *NUMERIC)}
        values = list_of(part.schema["enum"]) if "enum" in part.schema else [part.schema["const"]]
        if "const" in part.schema:
            wanted = _canonical(part.schema["const"])
            values = [value for value in values if _canonical(value) == wanted]
        values = [value for value in values if matches_type(value, part.schema.get("type"))]
        values = [value for value in values if kind_of(value) != "number" or _is_within(value, part)]
        large = [value for value in values if has_large_integer(value)]
        others = [value for value in values if not has_large_integer(value)]
        if siblings.keys() & {*OF_ARRAYS, *OF_OBJECTS} and any(isinstance(value, list | dict) for value in large):
            raise SchemaError(part.place, f"{INTEGER} in a constant beside bounds of its members is not supported")
        alternatives = [_constant(value) for value in large]
        if others:
            alternatives.append(_json(embed(replace(part, schema={**siblings, "enum": others}))))
        return self._any_of(part, alternatives)

    def _by_type(self, part: Part) -> str:
        """Return the expression of a part by the types that it allows. Types without large integers stay together."""
        schema = part.schema
        types = schema.get("type", [t for t in TYPES if t != "integer"])
        types = [types] if isinstance(types, str) else [t for t in list_of(types) if isinstance(t, str)]
        alternatives: list[str | None] = []
        others = dict(schema)
        for kind, keywords in (("number", NUMERIC), ("integer", NUMERIC), ("array", OF_ARRAYS), ("object", OF_OBJECTS)):
            inner = (value for tokens, value in iter_places(schema) if tokens[0] in keywords)
            if kind not in types or not (has_large_bound(schema) if keywords == NUMERIC else self._is_exact(*inner)):
                continue
            others = {name: value for name, value in others.items() if name not in keywords}
            alternatives.append(self._of_type(part, kind))
            types = [t for t in types if t != kind]
        if types:
            alternatives.append(_json(embed(replace(part, schema={**others, "type": types}))))
        return self._any_of(part, [found for found in alternatives if found])

    def _check_length(self, part: Part, members: Collection[Any]) -> None:
        if len(members) > MAX_MEMBERS:
            raise SchemaError(part.place, f"more than {MAX_MEMBERS} members beside {INTEGER} are not supported")

    def _of_type(self, part: Part, kind: str) -> str | None:
        if kind == "array":
            return self._array(part)
        if kind == "object":
            return self._object(part)
        if part.schema.get("multipleOf", 1) != 1 or ("multipleOf" in part.schema and kind == "number"):
            raise SchemaError(part.place.at("multipleOf"), f"`multipleOf` beside {INTEGER} is not supported")
        return _number(part.schema) if kind == "number" else _integer(part.schema)

    def _object(self, part: Part) -> str:
        schema = part.schema
        for name in ("patternProperties", "minProperties", "maxProperties"):
            if schema.get(name):
                raise SchemaError(part.place.at(name), f"`{name}` beside {INTEGER} is not supported")
        additional = schema.get("additionalProperties", True)
        properties = dict(schema.get("properties", {}))
        required = [name for name in list_of(schema.get("required")) if isinstance(name, str)]
        members: list[tuple[str, bool]] = []
        names = dict.fromkeys([*properties, *required])
        self._check_length(part, names)
        for name in names:
            tokens = ("properties", name) if name in properties else ("additionalProperties",)
            value = self._inner(part, properties.get(name, additional), *tokens)
            if value:
                members.append((f'{_literal(_write(name))} ws ":" ws {value} ws', name in required))
            elif name in required:
                raise SchemaError(part.place.at("required"), NO_VALUE)
        taken = [_literal(_write(name)) for name in names]
        other = self._inner(part, additional, "additionalProperties")
        return f'"{{" ws {self._members(members, taken, other)} "}}"'

    def _members(self, members: Sequence[tuple[str, bool]], taken: Sequence[str], other: str | None) -> str:
        """Return the expression of an object's members in their order, then of others with names not yet taken."""
        if other:
            name = self._new_rule("NAME")
            if taken:
                terminal = f"N{len(self._rules)}"
                self._add(terminal, f"NAME & ~({' | '.join(taken)})")
                name = terminal
            member = f'{name} ws ":" ws {other} ws'
            more = self._new_rule(f'("," ws {member})*')
            alone = self._new_rule(f"({member} {more})?")
        else:
            more = alone = self._new_rule('""')
        for member, is_required in reversed(members):
            alone = self._new_rule(f"{member} {more}" if is_required else f"{member} {more} | {alone}")
            following = f'"," ws {member}'
            more = self._new_rule(f"{following} {more}" if is_required else f"({following})? {more}")
        return alone

    def _array(self, part: Part) -> str | None:
        schema = part.schema
        items = schema.get("items", True)
        is_tuple = isinstance(items, list)
        keyword = "items" if is_tuple else "prefixItems"
        self._check_length(part, list_of(schema.get(keyword)))
        first = [self._inner(part, item, keyword, i) for i, item in enumerate(list_of(schema.get(keyword)))]
        rest_keyword = "additionalItems" if is_tuple else "items"
        rest = self._inner(part, schema.get(rest_keyword, True), rest_keyword)
        least = schema.get("minItems", 0)
        most = schema.get("maxItems")
        length = next((i for i, item in enumerate(first) if item is None), len(first))
        if length < len(first) or rest is None:
            most = min(length, length if most is None else most)
        if most is not None and least > most:
            return None
        prefix = first[: length if most is None else most]
        tail = self._items(rest, bool(prefix), max(least - len(prefix), 0), most, len(prefix))
        for i, item in reversed(list(enumerate(prefix))):
            comma = '"," ws ' if i else ""
            tail = self._new_rule(f"{comma}{item} ws {tail}" if i < least else f"({comma}{item} ws {tail})?")
        return f'"[" ws {tail} "]"'

    def _items(self, item: str | None, follows: bool, least: int, most: int | None, num_before: int) -> str:
        """Return the rule of items that are alike: at least some more, and `most` with those before."""
        if item is None or most == num_before:
            return self._new_rule('""')
        begin = "" if follows else f"{item} ws "
        count = (least, None if most is None else most - num_before)
        if not follows:
            count = (max(least - 1, 0), None if count[1] is None else count[1] - 1)
        repeated = f'{begin}("," ws {item} ws){{{count[0]},{"" if count[1] is None else count[1]}}}'
        return self._new_rule(repeated if follows or least else f"({repeated})?")


def _are_disjoint(parts: Sequence[Part]) -> bool:
    """Return whether parts exclude each other, of so few that the square of their number is no work."""
    return len(parts) <= MAX_ALTERNATIVES and all(exclude_each_other(a, b) for a, b in combinations(parts, 2))


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def _write(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _literal(text: str) -> str:
    """Return a text as Lark writes it, which is as JSON does but for the character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _constant(value: Any) -> str:
    """Return the expression of a constant that is or holds a large integer."""
    if not has_large_integer(value):
        return _json({"const": value})
    if isinstance(value, dict):
        members = (f'{_literal(_write(name))} ws ":" ws {_constant(item)} ws' for name, item in value.items())
        return f'"{{" ws {_join(members)}"}}"'
    if isinstance(value, list):
        return f'"[" ws {_join(f"{_constant(item)} ws" for item in value)}"]"'
    return _literal(str(value))


def _join(items: Iterator[str]) -> str:
    return ' "," ws '.join(items) + " "


def _limits(schema: Mapping[str, Any]) -> tuple[Fraction | None, bool, Fraction | None, bool]:
    """Return the least number of a part, whether it is excluded, the greatest, and whether that is."""
    return *_limit(schema, "minimum", "exclusiveMinimum", 1), *_limit(schema, "maximum", "exclusiveMaximum", -1)


def _limit(schema: Mapping[str, Any], inclusive: str, exclusive: str, sign: int) -> tuple[Fraction | None, bool]:
    """Return the strictest bound on a side, and whether it is excluded. `sign`: 1 where the larger one is stricter."""
    bound = schema.get(inclusive)
    other = schema.get(exclusive)  # in old drafts true or false
    bounds = [(sign * Fraction(bound), other is True)] if bound is not None else []
    bounds += [(sign * Fraction(other), True)] if other is not None and not isinstance(other, bool) else []
    if not bounds:
        return None, False
    strictest, excludes = max(bounds)
    return sign * strictest, excludes


def _plain(number: Fraction) -> float:
    return int(number) if number.denominator == 1 else float(number)


def _is_within(value: float, part: Part) -> bool:
    """Return whether a number satisfies the numeric keywords of a part."""
    low, excludes_low, high, excludes_high = _limits(part.schema)
    if value - value != 0:  # it is infinite or no number, and JSON cannot write it
        return False
    number = Fraction(str(value))
    step = part.schema.get("multipleOf", 0)
    if step and number % Fraction(str(step)):
        return False
    is_above = low is None or number > low or (number == low and not excludes_low)
    return is_above and (high is None or number < high or (number == high and not excludes_high))


def _integer(schema: Mapping[str, Any]) -> str | None:
    """Return the expression of the integers within the bounds of a part; None where there are none."""
    low, excludes_low, high, excludes_high = _limits(schema)
    least = None if low is None else -(-low // 1) + (excludes_low and low.denominator == 1)
    most = None if high is None else high // 1 - (excludes_high and high.denominator == 1)
    pattern = integer_pattern(least, most)
    return pattern and f"/{pattern}/"


def _number(schema: Mapping[str, Any]) -> str | None:
    """Return the expression of the numbers within the bounds of a part; None where there are none."""
    low, excludes_low, high, excludes_high = _limits(schema)
    found = []
    if (low is None or low < SMALL) and (high is None or high > -SMALL):
        least = (-SMALL, True) if low is None or low <= -SMALL else (_plain(low), excludes_low)
        most = (SMALL, True) if high is None or high >= SMALL else (_plain(high), excludes_high)
        names = ("exclusiveMinimum" if least[1] else "minimum"), ("exclusiveMaximum" if most[1] else "maximum")
        found.append(_json({"type": "number", names[0]: least[0], names[1]: most[0]}))
    for sign, near, excludes_near, far, excludes_far in (
        ("", low, excludes_low, high, excludes_high),
        ("-", None if high is None else -high, excludes_high, None if low is None else -low, excludes_low),
    ):
        begin, excludes_begin = (SMALL, False) if near is None or near < SMALL else (int(near), excludes_near)
        pattern = magnitude_pattern(begin, excludes_begin, None if far is None else int(far), excludes_far)
        if (far is None or far >= SMALL) and pattern:
            found.append(f"/{sign}({pattern})/")
    return " | ".join(found) or None
