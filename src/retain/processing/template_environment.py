"""The environment of chat templates: a jinja sandbox with what transformers gives templates.

It hides Python's internals, and no operator in it builds a huge text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_BUILT_CHARACTERS = 2**20  # by one operator; longer texts than messages are no prompts
MAX_DATE_FORMAT = 100  # characters
WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)")  # a width or a precision of a % format, given or as an argument


def create_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of chat templates, with what transformers gives them.

    No operator in it builds a huge text. Other costs are for the caller to bound.
    """
    from jinja2 import nodes, utils
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        """Checks the operators that turn a short source into a long text."""

        intercepted_binops = frozenset(("*", "%", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Apply an operator, unless its result would be too large. Raises ValueError."""
            sizes = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
            counts = [x for x in (left, right) if isinstance(x, int)]
            if operator == "*" and sizes and counts and sizes[0] * counts[0] > MAX_BUILT_CHARACTERS:
                raise ValueError("a product is too long")
            if operator == "%" and isinstance(left, str) and WIDE_FORMAT.search(left):
                raise ValueError("a format is too wide")
            if operator == "**" and (abs(left) > 10**6 or abs(right) > 64):
                raise ValueError("a power is too large")
            return super().call_binop(context, operator, left, right)

    class GenerationBlock(Extension):
        """Renders {% generation %}, which marks what the assistant writes for training, as its content."""

        tags = {"generation"}  # noqa: RUF012 - jinja declares it so

        def parse(self, parser: Parser) -> nodes.Node:
            """Parse up to {% endgeneration %}, in a scope of its own."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("call_body"), [], [], body).set_lineno(line)

        def call_body(self, caller: Callable[[], str]) -> str:
            """Return the text between the tags of a generation block."""
            return caller()

    class Namespace(utils.Namespace):
        """A namespace whose attributes are no internals of Python."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # any attribute may be called `self`
            attributes = dict(*args[1:], **kwargs)
            for name in attributes:
                Namespace._check(name)
            utils.Namespace.__init__(args[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            Namespace._check(name)
            super().__setitem__(name, value)

        @staticmethod
        def _check(name: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"the attribute {name!r} of a namespace begins with an underscore")

    # Without the optimizer, which would compute constant expressions before they are checked.
    env = Environment(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[GenerationBlock, loopcontrols])
    env.filters["tojson"] = tojson
    names = ("range", "cycler", "joiner")
    env.globals = {name: env.globals[name] for name in names} | {"dict": TemplateDict(), "namespace": Namespace}
    env.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return env


class TemplateDict:
    """What `dict` is in a template: it builds dictionaries, and is no type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return a new dictionary, as `dict(...)` does in a template."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a dictionary of these keys."""
        return dict.fromkeys(*args)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without escapes for HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    """Raise the error with which a template rejects messages."""
    raise ValueError(message)


def strftime_now(format: str) -> str:
    """Return the current time, for templates that include the date. Raises ValueError for a long format."""
    if len(format) > MAX_DATE_FORMAT:
        raise ValueError("the format of a date is too long")
    return datetime.now().strftime(format)
