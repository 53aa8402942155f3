"""What a chat template can write, read off its source: for whoever looks for the marks that it teaches a model."""

from __future__ import annotations

from retain.processing.template_environment import create_environment

COMPUTED = "…"  # what a template computes
COMPUTED_JSON = "{…}"  # what it computes and writes as JSON
WRITING_STATEMENTS = ("set",)  # whose texts may be written later


def read_template_text(source: str) -> str:
    """Return the literal texts of a chat template, in the order of its source, with `COMPUTED` for other values.

    A source that cannot be read is its own text.
    """
    from jinja2 import TemplateSyntaxError

    shown: list[str] = []
    strings: list[str] = []
    names: list[str] = []
    try:
        for _, kind, value in create_environment().lex(source):
            if kind == "data":
                shown.append(value)
            elif kind in ("variable_begin", "block_begin"):
                strings = []
                names = []
            elif kind == "string":
                strings.append(_unescape(value))
            elif kind == "name":
                names.append(value)
                strings.append("")
            elif kind == "variable_end":
                shown.append(_write_expression(strings, "tojson" in names))
            elif kind == "block_end" and names[:1] and names[0] in WRITING_STATEMENTS:
                shown += strings
    except TemplateSyntaxError:
        return source
    return "".join(shown)


def _write_expression(strings: list[str], is_json: bool) -> str:
    """Return the texts of an expression, with one sign for the names in a row between them."""
    computed = COMPUTED_JSON if is_json else COMPUTED
    written: list[str] = []
    for string in strings:
        if string or not written or written[-1] != computed:
            written.append(string or computed)
    return "".join(written)


def _unescape(literal: str) -> str:
    """Return the text of a string literal of jinja, which escapes as Python does."""
    try:
        return literal[1:-1].encode("ascii", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        return literal[1:-1]
