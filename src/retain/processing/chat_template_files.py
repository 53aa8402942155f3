"""Find the chat templates of a model by name: in a GGUF file, in a folder, or in a file that the user gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retain.processing.chat_template import DEFAULT


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
