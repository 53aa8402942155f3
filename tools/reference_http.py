"""The page of the HTTP API for tools/reference.py: routes, fields of requests, metrics."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.reference_text import NOTE, PACKAGE, code, find, sentence, table


def http_page() -> str:
    """Return the page of the routes, the fields of requests, and the metrics."""
    from pydantic import BaseModel

    text = "# HTTP API\n\n" + NOTE
    text += "The APIs of OpenAI and Anthropic, with fields of our own. An unknown field is an error.\n"
    text += "`GET /openapi.json` is the contract of a running server. Errors are\n"
    text += '`{"error": {"message", "type", "param", "code"}}`, and below `/v1/messages`\n'
    text += '`{"type": "error", "error": {"type", "message"}}`.\n\n## Routes\n\n'
    routes = [route for path in sorted((PACKAGE / "server").rglob("*.py")) for route in _routes(path)]
    text += table(["route", ""], routes)
    for cls in sorted(_classes("Request"), key=lambda c: ("v1" not in (c.__doc__ or ""), c.__name__)):
        if not issubclass(cls, BaseModel):
            continue
        schema = cls.model_json_schema()
        rows = [
            (
                code(name),
                _kind(field),
                _default(field, name in schema.get("required", ())),
                field.get("description", ""),
            )
            for name, field in schema["properties"].items()
        ]
        title = sentence(cls.__doc__).rstrip(".")
        text += f"\n## {cls.__name__}\n\n{title}.\n\n" + table(["field", "type", "default", "meaning"], rows)
    text += (
        "\n## Metrics\n\nOf `GET /metrics`, without their prefix (`--metrics-prefix`). A counter ends in `_total`.\n\n"
    )
    text += table(["metric", "kind", "labels", "meaning"], _metrics(PACKAGE / "server" / "metrics.py"))
    return text


def _default(field: dict[str, Any], is_required: bool) -> str:
    if is_required:
        return "required"
    return code(json.dumps(field["default"])) if "default" in field else ""


def _classes(suffix: str) -> list[type]:
    """Return the classes of the APIs whose names have this suffix."""
    paths = [path for api in ("openai", "anthropic") for path in sorted((PACKAGE / "server" / api).glob("*.py"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    return [find(name) for name in re.findall(rf"^class (\w+{suffix})\b", text, re.M)]


def _routes(path: Path) -> Iterator[tuple[str, str]]:
    """Read the routes that a file declares by decorators."""
    text = path.read_text(encoding="utf-8")
    prefix = re.search(r"APIRouter\(prefix=\"([^\"]*)\"", text)
    for node in ast.walk(ast.parse(text)):
        for call in getattr(node, "decorator_list", []):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
                method, route = call.func.attr.upper(), call.args[0]
                if method in ("GET", "POST", "DELETE") and isinstance(route, ast.Constant):
                    shown = f"{method} {prefix[1] if prefix else ''}{route.value}"
                    yield code(shown), sentence(ast.get_docstring(node))  # type: ignore[arg-type]


def _kind(field: dict[str, Any]) -> str:
    """Return the type of a JSON schema in a few words, with its bounds."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(f) for f in field["anyOf"] if f.get("type") != "null")) or "null"
    if "enum" in field:
        return ", ".join(code(v) for v in field["enum"])
    kind = field["$ref"].rpartition("/")[2] if "$ref" in field else field.get("type", "object")
    if kind == "array":
        return f"list of {_kind(field['items'])}"
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    small = high is not None and high < 2**31
    if low is not None or small:
        kind += f" {'above' if 'exclusiveMinimum' in field else 'from'} {low:g}" if low is not None else ""
        kind += f" to {high:g}" if small else ""
    return str(kind)


def _metrics(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Read the metrics that a file makes: calls with a name and a documentation, of functions named after a kind."""
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call) or len(call.args) < 2:
            continue
        function = ast.unparse(call.func).lower()
        kind = next((k for k in ("counter", "histogram", "gauge") if k in function), "")
        name = call.args[0].right if isinstance(call.args[0], ast.BinOp) else call.args[0]
        about = call.args[1]
        if kind and isinstance(name, ast.Constant) and isinstance(about, ast.Constant):
            rest = [*call.args[2:], *(k.value for k in call.keywords if k.arg and k.arg.startswith("label"))]
            values = [n.value for a in rest for n in ast.walk(a) if isinstance(n, ast.Constant)]
            labels = ", ".join(code(v) for v in values if isinstance(v, str))
            yield code(name.value), kind, labels, str(about.value)
