"""Render the jinja chat template of a model file in a sandbox.

Templates are untrusted: the sandbox hides Python's internals, and every error of a template becomes a ValueError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]  # in OpenAI's format: {"type": "function", "function": {...}}


MAX_BUILT_CHARACTERS = 2**20  # by one operator; longer texts than messages are no prompts
MAX_DATE_FORMAT = 100  # characters
WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)")  # a width or a precision of a % format, given or as an argument


class TemplateRenderer(Protocol):
    """Turns conversations into prompt texts."""

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool,
        tools: Tools | None = None,
        enable_thinking: bool | None = None,
    ) -> str:
        """Return the messages as prompt text. Raises ValueError when the template fails or does not support tools.

        `enable_thinking`: whether the model is to reason; None leaves that to the template.
        """
        ...


class ChatTemplate:
    """A compiled chat template. Raises ValueError when it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """`special_tokens` maps bos_token and the like to their texts."""
        from jinja2 import meta

        env = _create_environment()
        env.filters["tojson"] = tojson
        builtins = {name: env.globals[name] for name in ("range", "dict", "namespace")}
        env.globals = {**builtins, "raise_exception": raise_exception, "strftime_now": strftime_now, **special_tokens}
        try:
            self.can_use_tools = "tools" in meta.find_undeclared_variables(env.parse(source))
            self._template = env.from_string(source)
        except Exception as e:
            raise ValueError(f"the model's chat template is broken: {_first_line(e)}") from e

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool,
        tools: Tools | None = None,
        enable_thinking: bool | None = None,
    ) -> str:
        """See TemplateRenderer."""
        if tools and not self.can_use_tools:
            raise ValueError("the model's chat template does not support tools")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **({} if enable_thinking is None else {"enable_thinking": enable_thinking}),
            )
        except Exception as e:  # a template can raise any exception
            raise ValueError(f"the model's chat template fails: {_first_line(e)}") from e


def _create_environment() -> ImmutableSandboxedEnvironment:
    """Return a sandbox in which no operator builds a huge text. Other costs are for the caller to bound."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        """Checks the operators that turn a short source into a long text."""

        intercepted_binops = frozenset(("*", "%", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Apply a checked operator. Raises ValueError."""
            sizes = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
            counts = [x for x in (left, right) if isinstance(x, int)]
            if operator == "*" and sizes and counts and sizes[0] * counts[0] > MAX_BUILT_CHARACTERS:
                raise ValueError("a product is too long")
            if operator == "%" and isinstance(left, str) and WIDE_FORMAT.search(left):
                raise ValueError("a format is too wide")
            if operator == "**" and (abs(left) > 10**6 or abs(right) > 64):
                raise ValueError("a power is too large")
            return super().call_binop(context, operator, left, right)

    # Without the optimizer, which would compute constant expressions before they are checked.
    return Environment(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=["jinja2.ext.loopcontrols"])


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """Return JSON without escapes for HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    """Raise the error with which a template rejects messages."""
    raise ValueError(message)


def strftime_now(format: str) -> str:
    """Return the current time, for templates that include the date. Raises ValueError for a long format."""
    if len(format) > MAX_DATE_FORMAT:
        raise ValueError("the format of a date is too long")
    return datetime.now().strftime(format)


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]
