"""Chat templates: the jinja text that a model file carries, run in a sandbox.

Templates come from strangers. The sandbox keeps them from Python's internals; whatever else they do is a ValueError.
What is not known here: tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]  # as OpenAI describes them: {"type": "function", "function": {...}}


class ChatTemplate:
    """A chat template, compiled once. Raises ValueError when it is broken."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """`tokens` are the texts of bos_token and the like."""
        from jinja2 import meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = tojson
        given = {name: env.globals[name] for name in ("range", "dict", "namespace")}
        env.globals = {**given, "raise_exception": raise_exception, "strftime_now": strftime_now, **special_tokens}
        try:
            self.can_use_tools = "tools" in meta.find_undeclared_variables(env.parse(source))
            self._template = env.from_string(source)
        except Exception as e:
            raise ValueError(f"the model's chat template is broken: {_first_line(e)}") from e

    def render(self, messages: Messages, add_generation_prompt: bool, tools: Tools | None = None) -> str:
        """The messages as the text that the model was trained on. Raises ValueError when the template refuses them."""
        if tools and not self.can_use_tools:
            raise ValueError("the model's chat template knows no tools")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=tools, documents=None
            )
        except Exception as e:  # a template can fail in any way that Python can
            raise ValueError(f"the model's chat template fails: {_first_line(e)}") from e


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """JSON as it is. Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    """How a template says that it cannot render these messages."""
    raise ValueError(message)


def strftime_now(format: str) -> str:
    """The time, for templates that tell the model the date."""
    return datetime.now().strftime(format)


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]
