"""The page of the HTTP API for tools/reference.py: routes, fields of requests, metrics."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from retain.server.client_fields import FieldTable, Refused, read_refused_types
from tools.reference_text import NOTE, PACKAGE, code, find, sentence, table


def http_page() -> str:
    """Return the page of the routes, the fields of requests, and the metrics."""
    from retain.server.request_model import StrictModel

    text = "# HTTP API\n\n" + NOTE
    text += "The APIs of OpenAI and Anthropic, with fields of our own. An unknown field is an error,\n"
    text += "unless it is null: null is as good as absent everywhere.\n"
    text += "`GET /openapi.json` is the contract of a running server. Errors are\n"
    text += '`{"error": {"message", "type", "param", "code"}}`, and below `/v1/messages`\n'
    text += '`{"type": "error", "error": {"type", "message"}}`.\n\n## Routes\n\n'
    routes = [route for path in sorted((PACKAGE / "server").rglob("*.py")) for route in _routes(path)]
    text += table(["route", ""], routes)
    requests = [cls for cls in _classes("Request") if issubclass(cls, StrictModel)]
    for cls in sorted(requests, key=lambda c: ("v1" not in (c.__doc__ or ""), c.__name__)):
        schema = cls.model_json_schema(mode="validation")
        rows = [
            (
                code(name),
                _kind(field),
                _default(field, name in schema.get("required", ())),
                field.get("description", ""),
            )
            for name, field in schema["properties"].items()
            if name not in cls.other_fields
        ]
        title = sentence(cls.__doc__).rstrip(".")
        text += f"\n## {cls.__name__}\n\n{title}.\n\n" + table(["field", "type", "default", "meaning"], rows)
        text += "\n" + _other_fields([cls]) if cls.other_fields else ""
    objects = {cls for request in requests for cls in _models_in(request)} - {*requests}
    text += "\n## Objects in requests\n\nFields beside those of their models that are accepted or refused.\n\n"
    text += _other_fields(sorted((cls for cls in objects if cls.other_fields), key=lambda cls: cls.__name__))
    text += "\nTypes of blocks and of sources in Anthropic's format that are refused.\n\n"
    text += table(["type", "why"], [(code(kind), why) for kind, why in read_refused_types().items()])
    sources = sorted((PACKAGE / "server" / "observers").rglob("*.py"), reverse=True)
    metrics = [row for path in sources for row in _metrics(path)]
    text += "\n## Metrics\n\nOf `GET /metrics`. Each has the labels `model_name` and `engine`, too.\n"
    text += "A counter ends in `_total`.\n\n"
    text += table(["metric", "kind", "labels", "meaning"], metrics)
    return text


def _other_fields(models: Sequence[Any]) -> str:
    """Return a table of the fields that these models accept without effect, or refuse. Equal rows are one."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for cls in models:
        for row in _describe_rules(cls.other_fields):
            rows.setdefault(row, []).append(code(cls.__name__))
    if len(models) == 1:
        return table(["other field", "accepted", "why"], list(rows))
    listed = sorted((", ".join(names), *row) for row, names in rows.items())
    return table(["objects", "other field", "accepted", "why"], listed)


def _describe_rules(rules: FieldTable) -> Iterator[tuple[str, str, str]]:
    for name, rule in rules.items():
        if isinstance(rule, Refused):
            yield code(name), "no", rule.why
        elif rule.values is None:
            yield code(name), "yes, without effect", rule.why
        else:
            yield code(name), f"only {' or '.join(code(json.dumps(v)) for v in rule.values)}", rule.why


def _models_in(model: Any) -> set[Any]:
    """Return the models of all objects in a request, at any depth."""
    from pydantic import BaseModel

    found: set[Any] = set()
    annotations = [field.annotation for field in model.model_fields.values()]
    while annotations:
        annotation = annotations.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if annotation not in found:
                found.add(annotation)
                annotations += [field.annotation for field in annotation.model_fields.values()]
        else:
            annotations += get_args(annotation)
    return found


def _default(field: dict[str, Any], is_required: bool) -> str:
    if is_required:
        return "required"
    return code(json.dumps(field["default"])) if "default" in field else ""


def _classes(suffix: str) -> list[type]:
    """Return the classes of the APIs whose names have this suffix."""
    paths = [path for api in ("openai", "anthropic") for path in sorted((PACKAGE / "server" / api).rglob("*.py"))]
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
    if kinds := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(_kind(f) for f in kinds if f.get("type") != "null")) or "null"
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
