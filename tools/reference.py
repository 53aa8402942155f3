"""Write docs/reference/ from the code: options, configuration, plug-ins, the APIs of Python and HTTP, models, files.

    python -m tools.reference            write the pages
    python -m tools.reference --check    list the pages that are not up to date, exit code 1 if there are any

It needs what the server needs: pip install 'retain[serve]'. tests/unit/test_docs.py compares the pages with the code.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from retain.cli.args import build_parser
from retain.options import option_fields, option_values
from retain.plugins import plugin_names
from tools.reference_files import files_page
from tools.reference_http import http_page
from tools.reference_models import models_page
from tools.reference_text import NOTE, ROOT, code, find, sentence, table

PAGES = ROOT / "docs" / "reference"


# ---- the command line ------------------------------------------------------------------------------------------------


def commands(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Return every command that takes options of its own, with its help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for sub, child in action.choices.items():
                found = list(commands(child, f"{name} {sub}".strip()))
                yield from found or [(f"{name} {sub}".strip(), helps.get(sub, ""), child)]


def options(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Return the options and arguments of a command with their help."""
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        if action.choices and not action.metavar:
            metavar = "{" + ",".join(map(str, action.choices)) + "}"
        value = "" if action.nargs == 0 else " " + metavar
        name = ", ".join(action.option_strings) + value if action.option_strings else metavar
        rows.append((code(name), (action.help or "") % {**vars(action), "prog": parser.prog}))
    return rows


def cli_page() -> str:
    """Return the page of the command line; options that several commands share are listed once."""
    found = list(commands(build_parser()))
    users: dict[tuple[str, str], list[str]] = {}
    for name, _, parser in found:
        for row in options(parser):
            users.setdefault(row, []).append(name)
    groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for row, names in users.items():
        groups.setdefault(tuple(names), []).append(row)
    groups = {names: rows for names, rows in groups.items() if len(names) > 3 or (len(names) > 1 and len(rows) > 3)}
    shared = {row for rows in groups.values() for row in rows}
    text = "# Command line\n\n" + NOTE
    text += "`retain COMMAND [OPTIONS]`. Options that several commands share are at the end.\n\n"
    text += table(["command", ""], [(f"[`retain {n}`](#retain-{n.replace(' ', '-')})", h) for n, h, _ in found])
    for name, about, parser in found:
        text += f"\n## retain {name}\n\n{about[:1].upper()}{about[1:].rstrip('.')}.\n"
        own = [row for row in options(parser) if row not in shared]
        if own:
            text += "\n" + table(["option", "meaning"], own)
    text += "\n## Shared options\n"
    for names, rows in groups.items():
        text += f"\n{_wrapped('Of ' + _listing([code(n) for n in names]) + ':')}\n\n" + table(
            ["option", "meaning"], rows
        )
    return text


def _listing(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]


# ---- dataclasses -----------------------------------------------------------------------------------------------------


def field_helps(cls: type) -> dict[str, str]:
    """Return what the fields of a dataclass mean: their `metadata["help"]`, else the comment beside them."""
    helps = {f.name: str(f.metadata["help"]) for f in dataclasses.fields(cls) if "help" in f.metadata}
    for base in cls.__mro__[:-1]:
        try:
            lines = textwrap.dedent(inspect.getsource(base)).splitlines()
        except (OSError, TypeError):
            continue
        body = ast.parse("\n".join(lines)).body[0]
        for node in body.body if isinstance(body, ast.ClassDef) else []:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno:
                comment = lines[node.end_lineno - 1][node.end_col_offset :].partition("#")[2].strip()
                helps.setdefault(node.target.id, comment)
    return helps


def fields(cls: type, names: Iterable[str] | None = None) -> str:
    """Return a table of the fields that can be given to a dataclass."""
    rows = []
    for owner, f in option_fields(cls):
        if f.name.startswith("_") or (names is not None and f.name not in names):
            continue
        helps = field_helps(owner if isinstance(owner, type) else type(owner))
        default = "required"
        if f.default is not dataclasses.MISSING:
            default = code(f.default if isinstance(f.default, str) and f.default else _shown(f.default))
        elif f.default_factory is not dataclasses.MISSING:
            default = code(_shown(f.default_factory()))
        kind = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
        rows.append((code(f.name), code(kind), default, helps.get(f.name, "")))
    return table(["field", "type", "default", "meaning"], rows)


def _shown(value: object) -> str:
    if dataclasses.is_dataclass(value) and type(value).__str__ is not object.__str__:
        return str(value)  # as a spec has it
    return f"{type(value).__name__}()" if dataclasses.is_dataclass(value) or " at 0x" in repr(value) else repr(value)


def configuration_page() -> str:
    """Return the page of the configuration dataclasses."""
    text = "# Configuration\n\n" + NOTE
    text += "The dataclasses behind the options. `LLM` takes the fields of `Config` as keywords, sizes also as text.\n"
    for cls in map(find, ("Config", "SamplingParams", "ServerConfig", "Limits")):
        text += f"\n## {cls.__name__}\n\n`{cls.__module__}.{cls.__name__}`\n\n" + fields(cls)
    return text


def plugins_page() -> str:
    """Return the page of the files that are chosen by a spec, with their options."""
    budget, scored = find("BudgetPolicy"), find("AttentionScoredPolicy")

    def own(cls: type, *bases: type) -> list[str]:
        inherited = {name for base in bases if issubclass(cls, base) for name in option_values(base)}
        return [name for name in option_values(cls) if name not in inherited and name[0] != "_"]

    text = "# Plug-ins\n\n" + NOTE
    text += "A plug-in is one file, and its name is the name of the file. The syntax is `name:key=value,...`.\n"
    text += "Amounts are tokens or percentages (`1024`, `25%`), sizes have units (`64MiB`).\n"
    text += "\n## Policies\n\nFor `--kv-policy`; how to choose: [guide](../guide/policies.md).\n"
    text += "\n### Options of every budget\n\n" + fields(budget)
    names = own(scored, budget)
    text += "\n### Options of policies that score attention\n\n" + fields(scored, names)
    for title, package, cls, note in (
        ("", "retain.kv.eviction.policies", "Policy", ""),
        ("Drafters", "retain.engine.drafters", "Drafter", "For `--speculate`; [guide](../guide/speculation.md)."),
        ("Tiers", "retain.kv.stores.tiers", "Tier", "For `--tier`; [guide](../guide/prefixes.md#tiers)."),
    ):
        text += f"\n## {title}\n\n{note}\n" if title else ""
        for name in plugin_names(package):
            module = importlib.import_module(f"{package}.{name}")
            kind = getattr(module, cls)
            about = sentence(" ".join((module.__doc__ or "").split()).removeprefix(f"{name}: "))
            text += f"\n### {name}\n\n{_wrapped(about)}\n"
            rest = own(kind, budget, scored)
            if issubclass(kind, budget):
                common = "score attention" if issubclass(kind, scored) else "have a budget"
                text += f"\nOptions: those of policies that {common}{', and:' if rest else '.'}\n"
            if rest:
                text += "\n" + fields(kind, rest)
    return text


def _wrapped(text: str) -> str:
    return textwrap.fill(text[:1].upper() + text[1:], 118, break_long_words=False, break_on_hyphens=False)


# ---- the Python API --------------------------------------------------------------------------------------------------


def python_page() -> str:
    """Return the page of the public classes."""
    import retain

    text = "# Python API\n\n" + NOTE
    text += "`from retain import ...`. Parameters are in [configuration](configuration.md).\n"
    for name in retain.__all__:
        cls = getattr(retain, name)
        text += f"\n## {name}\n\n{_docstring(cls)}\n"
        if "__dataclass_fields__" in vars(cls):
            text += "\n" + fields(cls)
        for attribute, member in vars(cls).items():
            if attribute.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
                continue
            if isinstance(member, property):
                text += f"\n### {name}.{attribute}\n\n*Property.* {_docstring(member)}\n"
            else:
                signature = f"```python\n{_signature(attribute, member)}\n```"
                text += f"\n### {name}.{attribute}\n\n{signature}\n\n{_docstring(member)}\n"
    return text


def _signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    shown = []
    for p in parameters:
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else f" = {p.default!r}".replace("'", '"')
        shown.append(f"{stars}{p.name}: {p.annotation}{default}")
    for i, p in enumerate(parameters):
        if p.kind is p.KEYWORD_ONLY and not any(q.kind is q.VAR_POSITIONAL for q in parameters):
            shown.insert(i, "*")
            break
    returned = "" if signature.return_annotation is inspect.Signature.empty else f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(shown)}){returned}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {s},\n" for s in shown) + f"){returned}"


def _docstring(thing: object) -> str:
    return inspect.getdoc(thing) or ""


def pages() -> dict[Path, str]:
    """Return every page with its text."""
    made = {
        "cli": cli_page,
        "configuration": configuration_page,
        "plugins": plugins_page,
        "python": python_page,
        "http": http_page,
        "models": models_page,
        "files": files_page,
    }
    return {PAGES / f"{name}.md": make() for name, make in made.items()}


def outdated() -> list[str]:
    """Return the pages that differ from the code."""
    return [p.name for p, text in pages().items() if not p.exists() or p.read_text(encoding="utf-8") != text]


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--check", action="store_true", help="write nothing")
    if arguments.parse_args().check:
        wrong = outdated()
        print(*(f"not up to date: {name}" for name in wrong), sep="\n")
        sys.exit(bool(wrong))
    for page, content in pages().items():
        page.write_text(content, encoding="utf-8")
