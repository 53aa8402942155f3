"""The documents say what is true: links, paths, commands, Python, the generated reference."""

import argparse
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from retain.cli.args import build_parser
from retain.kernels.api import Backend
from retain.models import list_families
from tools.agent_bench.__main__ import build_parser as build_agent_bench_parser
from tools.reference import outdated

ROOT = Path(__file__).parents[2]
NAMES = ("README", "CONTRIBUTING", "CHANGELOG", "packages/cachecheck/README")
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / f"{n}.md" for n in NAMES)]
CHANGES = ROOT / "CHANGELOG.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_reference_equals_code() -> None:
    assert not outdated(), "python -m tools.reference"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_prose_lines_are_short(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    assert not [line for line in prose if len(line) > 120 and not line.startswith("|")]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_exist(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in t]
    assert not [t for t in targets if t and not (page.parent / t).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page: Path) -> None:
    paths = re.findall(
        r"(?<![\w/.-])(?<!\]\()(?:src|tests|tools|docs|deploy|examples|packages)/[\w./-]*\w",
        page.read_text(encoding="utf-8"),
    )
    new = re.findall(r"^\+\+\+ b/(\S+)", page.read_text(encoding="utf-8"), re.M)  # made by a diff
    assert not [p for p in paths if not (ROOT / p).exists() and p not in new and p != "docs/reference"]


def test_named_tests_exist() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "guide" / "security.md").read_text(encoding="utf-8"))
    assert len(named) > 10 and not [n for n in named if f"def {n}(" not in tests]


SPECULATION = re.compile(r"specul|drafter|tokens a step", re.I)
EXACT = re.compile(r"\bexact(ly)?\b|equals greedy|target's distribution", re.I)


@pytest.mark.parametrize("page", [p for p in PAGES if p != CHANGES and "log" not in p.parts], ids=name)
def test_speculation_is_claimed_to_be_exact_only_beside_its_limit(page: Path) -> None:
    """Policies that score attention may keep other tokens under speculation."""
    blocks = re.split(r"\n\n+|\n(?=[|*#] ?|\d+\. )", page.read_text(encoding="utf-8"))
    claims = [b for b in blocks if SPECULATION.search(b) and EXACT.search(b)]
    assert not [b for b in claims if not re.search(r"scores?\s+attention", b)]


def test_named_documents_exist() -> None:
    """Paths of documents in the sources."""
    for folder in ("src", "tests", "tools", "deploy", "examples", "packages"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h", ".yaml", ".html", ".js", ".service"):
                named = re.findall(r"(?<![\w/])docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
                assert not [n for n in named if not (ROOT / n).exists()], path


parser = cache(build_parser)  # parsing leaves it as it is


@cache
def words_of_sources() -> set[str]:
    sources = [p for d in ("src", "tests", "tools", "packages") for p in (ROOT / d).rglob("*.py")]
    return {w for p in sources for w in re.findall(r"\w+", p.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", [p for p in PAGES if p != CHANGES], ids=name)
def test_named_classes_exist(page: Path) -> None:
    """Classes in the text, with their members, are words of the sources."""
    named = re.findall(r"`([A-Z]\w*[a-z]\w*(?:\.\w+)*)`", FENCE.sub("", page.read_text(encoding="utf-8")))
    assert not [n for n in named if not words_of_sources().issuperset(n.split("."))]


def command_lines(page: Path) -> list[str]:
    """The `retain ...` commands of a page, in code blocks and in the text; those with an ellipsis only show a part."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(body for _, body in FENCE.findall(text)).replace("\\\n", " ")
    found = re.findall(r"^(?:\$ |\.venv/bin/)?(retain (?:run|chat|serve|bench|cache)\b.*)", blocks, re.M)
    found += re.findall(r"`(?:time )?(retain (?:run|chat|serve|bench|cache) [^`]*)`", FENCE.sub("", text))
    return [line for line in found if "..." not in line]


@pytest.mark.parametrize("page", [p for p in PAGES if command_lines(p)], ids=name)
def test_commands_parse(page: Path) -> None:
    for line in command_lines(page):
        words = shlex.split(line, comments=True)[1:]
        if (words[0] == "bench" and len(words) == 2) or page.name in ("cli.md", "files.md"):
            continue
        parser().parse_args(words[: words.index("|")] if "|" in words else words)


def known_options(parser: argparse.ArgumentParser) -> set[str]:
    """Every option of a parser and of its commands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*(known_options(child) for child in action.choices.values()))
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if p != CHANGES], ids=name)
def test_options_exist(page: Path) -> None:
    """Options that the text names are those of a command, or of a program that pages name in full."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))
    named = {o for span in spans if re.match(r"retain |--", span) for o in re.findall(r"(?<!\S)--[a-z][\w-]*", span)}
    tools = " ".join(p.read_text(encoding="utf-8") for p in (ROOT / "tools").glob("*.py"))
    known = known_options(parser()) | known_options(build_agent_bench_parser())
    assert not {o for o in named - known if f'"{o}"' not in tools}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_compiles(page: Path) -> None:
    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python" and page.name != "python.md":  # that has signatures
            compile(body, str(page), "exec")
        if language == "diff":
            compile(
                "\n".join(line[1:] for line in body.splitlines() if re.match(r"\+(?!\+\+)", line)), str(page), "exec"
            )


def test_readme_counts_the_families() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"[{len(list_families())} families](docs/reference/models.md)" in text


def test_contributing_names_the_contract_of_a_backend() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = text.partition("## A new backend")[2].partition("states:")[2].partition(".")[0]
    members = {n for n in {**vars(Backend), **Backend.__annotations__} if not n.startswith("_")}
    assert set(re.findall(r"`(\w+)`", listed)) == members


def test_glossary_has_every_word() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    words = "slot hole punch page ring sinks budget capacity priority mass tier salt pin drafter family backend program"
    assert not [w for w in words.split() if f"\n| {w}" not in text]
