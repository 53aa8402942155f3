"""Render the jinja chat template of a model file in a sandbox.

Templates are untrusted: the sandbox hides Python's internals, and every error of a template becomes a ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]  # in OpenAI's format: {"type": "function", "function": {...}}


class ChatTemplate:
    """A compiled chat template. Raises ValueError when it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """`special_tokens` maps bos_token and the like to their texts."""
        from jinja2 import meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = tojson
        builtins = {name: env.globals[name] for name in ("range", "dict", "namespace")}
        env.globals = {**builtins, "raise_exception": raise_exception, "strftime_now": strftime_now, **special_tokens}
        try:
            self.can_use_tools = "tools" in meta.find_undeclared_variables(env.parse(source))
            self._template = env.from_string(source)
        except Exception as e:
            raise ValueError(f"the model's chat template is broken: {_first_line(e)}") from e

    def render(self, messages: Messages, add_generation_prompt: bool, tools: Tools | None = None) -> str:
        """Return the messages as prompt text. Raises ValueError when the template fails or does not support tools."""
        if tools and not self.can_use_tools:
            raise ValueError("the model's chat template does not support tools")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=tools, documents=None
            )
        except Exception as e:  # a template can raise any exception
            raise ValueError(f"the model's chat template fails: {_first_line(e)}") from e


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """Return JSON without escapes for HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    """Raise the error with which a template rejects messages."""
    raise ValueError(message)


def strftime_now(format: str) -> str:
    """Return the current time, for templates that include the date."""
    return datetime.now().strftime(format)


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]
