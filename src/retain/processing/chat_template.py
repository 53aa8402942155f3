"""The jinja chat templates of a model: found in its files, rendered in a sandbox. One that fails is a ValueError."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from retain.processing.template_environment import create_environment

Messages = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]  # in OpenAI's format: {"type": "function", "function": {...}}
# Names of templates.
DEFAULT = "default"
TOOL_USE = "tool_use"


class TemplateRenderer(Protocol):
    """Turns conversations into prompt texts."""

    def render(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Messages,
        add_generation_prompt: bool,
        tools: Tools | None,
        variables: Variables,
    ) -> str:
        """Return the messages as prompt text by the template `source`. Raises ValueError as `ChatTemplate` does."""


class ChatTemplate:
    """A compiled chat template. Raises ValueError when it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """`special_tokens` maps bos_token and the like to their texts."""
        from jinja2 import meta

        env = create_environment()
        env.globals.update(special_tokens)
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
        variables: Variables | None = None,
    ) -> str:
        """Return the messages as prompt text. Raises ValueError when the template fails or does not support tools.

        `variables` are others that the template reads, such as `documents` and `enable_thinking`.
        """
        if tools and not self.can_use_tools:
            raise ValueError("the model's chat template does not support tools")
        given: dict[str, Any] = {"messages": [_normalize(m) for m in messages], "tools": tools}
        given["add_generation_prompt"] = add_generation_prompt
        variables = variables or {}
        functions = {name for name, value in self._template.globals.items() if not isinstance(value, str)}
        if taken := sorted(variables.keys() & (given.keys() | functions)):
            raise ValueError(f"the variable {taken[0]} of the chat template cannot be set")
        try:
            return self._template.render({"documents": None, **variables, **given})
        except Exception as e:  # a template can raise any exception
            raise ValueError(f"the model's chat template fails: {_first_line(e)}") from e


class ChatTemplates:
    """The chat templates of a model, by name.

    A conversation with tools is rendered by the one named `tool_use`, where there is one, others by `default`.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]):
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self.renderer: TemplateRenderer | None = None  # None: this process
        self._compiled: dict[str, ChatTemplate] = {}

    def choose(self, source: str | None = None, name: str | None = None) -> ChatTemplates:
        """Return these with another template for all conversations: a source, or else one of them by its name.

        Those that may be rendered are compiled now. Raises ValueError.
        """
        chosen = self
        if source is None and name is not None:
            source = self.sources.get(name)
            if source is None:
                known = f"the model's are {', '.join(sorted(self.sources))}" if self.sources else "the model has none"
                raise ValueError(f"chat template {name!r} is neither a file nor a name: {known}")
        if source is not None:
            chosen = ChatTemplates({DEFAULT: source}, self.special_tokens)
        for key in (DEFAULT, TOOL_USE):
            if key in chosen.sources:
                chosen._compile(chosen.sources[key])
        return chosen

    def find(self, has_tools: bool) -> str | None:
        """Return the source of the template for a conversation; None where there is none."""
        default = self.sources.get(DEFAULT)
        return self.sources.get(TOOL_USE, default) if has_tools else default

    def render(
        self, messages: Messages, add_generation_prompt: bool, tools: Tools | None, variables: Mapping[str, Any]
    ) -> str:
        """Return the messages as prompt text. Raises ValueError where no template can."""
        source = self.find(has_tools=bool(tools))
        if source is None and self.sources:
            known = ", ".join(sorted(self.sources))
            raise ValueError(f"none of the model's chat templates is the default: choose {known} (--chat-template)")
        if source is None:
            raise ValueError("this model has no chat template: give it raw text")
        if self.renderer:
            return self.renderer.render(source, self.special_tokens, messages, add_generation_prompt, tools, variables)
        return self._compile(source).render(messages, add_generation_prompt, tools, variables)

    def _compile(self, source: str) -> ChatTemplate:
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source, self.special_tokens)
        return self._compiled[source]


def _normalize(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null fields, as transformers does, its reasoning under each name that templates read."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in ("reasoning_content", "thinking", "reasoning") if key in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


def find_chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a GGUF file by name. Raises ValueError for one that is not a text."""
    key = "tokenizer.chat_template"
    found = {DEFAULT: metadata[key]} if key in metadata else {}
    found |= {k.removeprefix(f"{key}."): v for k, v in metadata.items() if k.startswith(f"{key}.")}
    if not all(isinstance(source, str) for source in found.values()):
        raise ValueError("the chat template is not a text")
    return found


def read_chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a folder by name. Files take precedence over the tokenizer's configuration."""
    files = {f.stem: f for f in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        files[DEFAULT] = path / "chat_template.jinja"
    found = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    if DEFAULT in found:
        return found
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}
    listed = template if isinstance(template, dict) else {DEFAULT: template}
    texts = {str(name): source for name, source in listed.items() if isinstance(source, str)}
    return {DEFAULT: texts[DEFAULT], **found} if found and DEFAULT in texts else found or texts


def read_chat_template(given: str | None) -> str | None:
    """Return the source of a chat template, given itself or as a file; None for a name. Raises ValueError, OSError."""
    if given is None or any(mark in given for mark in ("{{", "{%", "\n")):
        return given
    path = Path(given)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path}: the chat template is not UTF-8 text") from None
    if path.suffix or len(path.parts) > 1:
        raise ValueError(f"{path}: no such chat template")
    return None


MARKER = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own; the blank shows whether the template trims messages


def render_unfinished(render: Callable[[Messages], str], messages: Messages) -> str:
    """Return messages as prompt text up to the end of the last one's content.

    `render` renders messages without the beginning of an answer. Where the template trims messages, the end is trimmed
    too. Raises ValueError if the template does not show the last message as it is.
    """
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise ValueError("the last message has no text to continue")
    text = render([*messages[:-1], {**messages[-1], "content": content + MARKER}])
    begun, marker, _ = text.rpartition(MARKER.strip())
    if not marker or content.strip() not in text:
        raise ValueError("the model's chat template does not show the last message as it is: it cannot be continued")
    return begun if text.startswith(MARKER, len(begun)) else begun.rstrip()
