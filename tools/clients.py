"""Run real clients against a server that answers them at once, and print what they sent and what failed.

    python -m tools.clients langchain codex          # install each into a temporary folder, and run its recipe
    python -m tools.clients --folder ~/clients all   # keep what is installed
    python -m tools.clients --list

A recipe is a file in tools/client_recipes: packages of a client, its settings, and the tool that the model is to call.
The model is tiny and its answers are dictated (tests/server/real_clients.py): first a call of that tool, then a text.
Clients get an environment of their own and addresses of this machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from retain.server.openai.chat_protocol import ChatCompletionRequest
from tests.server.real_clients import Exchange, Generation, Log, open_dictated_server

Json = dict[str, Any]
RECIPES = Path(__file__).parent / "client_recipes"
NOTE = "Bring milk."  # what the file says that agents read
FINAL = "The note says: bring milk."
TITLE = "A note"
NO_PROXY = "http://127.0.0.1:9"  # nobody listens there
TIME_LIMIT = 180.0


@dataclass(frozen=True)
class Recipe:
    """How a client is installed, pointed at a server and asked; {url}, {work} and {home} stand for places.

    `call`: the name and the arguments of the tool call that the model writes first. `plain`: what it answers to a
    prompt without tools.
    """

    name: str
    packages: list[str]
    version: str  # of which package the version is told
    commands: list[list[str]]
    registry: str = "pypi"
    node: str = ""  # a version of Node.js that the client needs, from its package
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    call: Json = field(default_factory=dict)
    plain: str = TITLE
    final: str = FINAL
    expected: str = ""  # what the client prints at the end: by default the final text
    compaction: str = ""  # what the client says where it asks for a summary of its history
    session: Json = field(default_factory=dict)  # what differs in a long session (tools/record_session.py)


def recipe_names() -> list[str]:
    """Return the names of all clients."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(name: str) -> Recipe:
    """Return the recipe of a client. Raises ValueError for an unknown one."""
    if name not in recipe_names():
        raise ValueError(f"unknown client {name}: one of {', '.join(recipe_names())}")
    return Recipe(name, **tomllib.loads((RECIPES / f"{name}.toml").read_text("utf-8")))


def install(recipe: Recipe, folder: Path) -> None:
    """Install the packages of a client into a folder. Raises CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / "installed"
    if marker.exists():
        return
    if recipe.registry == "npm":
        node = [f"node@{recipe.node}"] if recipe.node else []
        for packages in filter(None, (node, recipe.packages)):  # npm chooses versions that run on this Node.js
            environment = os.environ | {"PATH": f"{folder}/node_modules/.bin:{os.environ['PATH']}"}
            command = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), *packages]
            subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    else:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        for package in recipe.packages:
            subprocess.run([*pip, *package.split()], check=True)
    marker.touch()


def find_version(recipe: Recipe, folder: Path) -> str:
    """Return the installed version of a client."""
    if recipe.registry == "npm":
        return json.loads((folder / "node_modules" / recipe.version / "package.json").read_text())["version"]
    code = f"import importlib.metadata as m; print(m.version({recipe.version!r}))"
    return subprocess.run(
        [folder / "bin/python", "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


# ---- a run -------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a client did."""

    recipe: Recipe
    version: str
    log: Log
    output: str
    statuses: list[int]
    seconds: float
    places: dict[str, str]  # of files, by name

    @property
    def turns(self) -> list[Generation]:
        """The answers of the conversation: without titles and the like."""
        return [g for g in self.log.generations if g.answer != TITLE] or self.log.generations

    @property
    def failures(self) -> list[str]:
        """What went wrong, in words."""
        found = [f"exit status {status}" for status in self.statuses if status]
        found += [f"{e.status} {e.method} {e.path}" for e in self.log.exchanges if e.status >= 400]
        expected = self.recipe.expected or self.recipe.final
        return found if expected in self.output else [*found, f"its output lacks {expected!r}"]

    @property
    def cached_share(self) -> float | None:
        """The cached share of the second turn's prompt."""
        if len(self.turns) < 2:
            return None
        return self.turns[1].cached_tokens / self.turns[1].prompt_tokens

    def summary(self) -> Json:
        """Return what is known of the run."""
        first = next((e for e in self.log.exchanges if e.method == "POST" and e.body.get("tools")), None)
        first = first or next((e for e in self.log.exchanges if e.method == "POST"), None)
        return {
            "client": self.recipe.name,
            "version": self.version,
            "apis": sorted({f"{e.method} {e.path}" for e in self.log.exchanges}),
            "fields": sorted(first.body) if first else [],
            "tools": len(first.body.get("tools") or []) if first else 0,
            "prompt_tokens": [g.prompt_tokens for g in self.turns],
            "cached_tokens": [g.cached_tokens for g in self.turns],
            "other_prompts": len(self.log.generations) - len(self.turns),
            "cached_share": self.cached_share,
            "failures": self.failures,
            "seconds": round(self.seconds, 1),
        }


def answer(recipe: Recipe, work: Path, body: ChatCompletionRequest) -> str:
    """Return what the model is to say to a conversation: a call of the recipe's tool, a text or a title."""
    roles = [message.role for message in body.messages]
    if "tool" in roles:
        return recipe.final
    names = [tool.function.name for tool in body.tools or []]
    if recipe.call and recipe.call["name"] in names:
        call = json.dumps(recipe.call).replace("{work}", str(work))
        return f"<tool_call>{call}</tool_call>"
    return recipe.plain


Answer = Callable[[Recipe, Path, ChatCompletionRequest], str]


def run(recipe: Recipe, folder: Path, say: Answer = answer, note: str = NOTE, **server_options: Any) -> Run:
    """Run an installed client against a server of its own, whose model says what `say` returns."""
    with tempfile.TemporaryDirectory() as temporary:
        home, work = Path(temporary) / "home", Path(temporary) / "work"
        home.mkdir()
        work.mkdir()
        (work / "note.txt").write_text(note + "\n")
        subprocess.run(["git", "init", "-q", work], check=True)
        with open_dictated_server(lambda body: say(recipe, work, body), **server_options) as (server, log):
            url = server.url.removesuffix("/v1")
            places = {"url": url, "work": str(work), "home": str(home), "recipes": str(RECIPES), "folder": str(folder)}

            def fill(text: str) -> str:
                for name, place in places.items():
                    text = text.replace("{" + name + "}", place)
                return text

            for name, text in recipe.files.items():
                path = Path(fill(name))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(fill(text))
            environment = client_environment(folder, home)
            environment |= {name: fill(value) for name, value in recipe.environment.items()}
            output, statuses = "", []
            begin = perf_counter()
            for command in recipe.commands:
                status, text = run_command([fill(word) for word in command], work, environment)
                output += text
                statuses.append(status)
            version = find_version(recipe, folder)
            return Run(recipe, version, log, output, statuses, perf_counter() - begin, places)


def client_environment(folder: Path, home: Path) -> dict[str, str]:
    """Return the environment of a client: nothing of this process's, and no way to other machines."""
    return {
        "PATH": f"{folder}/bin:{folder}/node_modules/.bin:{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "CI": "1",
        "DO_NOT_TRACK": "1",
        "HTTP_PROXY": NO_PROXY,
        "HTTPS_PROXY": NO_PROXY,
        "NO_PROXY": "127.0.0.1,localhost",
        "OPENAI_API_KEY": "none",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def run_command(command: Sequence[str], work: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Return the exit status of a command and what it printed; -1 when it took too long."""
    try:
        done = subprocess.run(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIME_LIMIT,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        return -1, (error.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout


# ---- output ------------------------------------------------------------------------------------------------------


def format_row(summary: Json) -> str:
    """Return a row of the table of clients."""
    share = summary["cached_share"]
    cells = [
        summary["client"],
        summary["version"],
        ", ".join(api.split()[1] for api in summary["apis"] if api.startswith("POST")),
        f"{summary['tools']} tools; prompts of {', '.join(map(str, summary['prompt_tokens']))} tokens",
        "-" if share is None else f"{share:.1%}",
        "; ".join(summary["failures"]) or "nothing",
    ]
    return "| " + " | ".join(cells) + " |"


def describe_exchange(exchange: Exchange) -> str:
    """Return the fields of a request, and an error in full."""
    fields = ", ".join(sorted(exchange.body))
    text = f"  {exchange.method} {exchange.path} {exchange.status}: {fields}"
    return text if exchange.status < 400 else f"{text}\n    {exchange.response.decode(errors='replace')[:2000]}"


@contextmanager
def open_folder(path: Path | None) -> Iterator[Path]:
    """Yield a folder to install into: this one, or a temporary one."""
    if path:
        yield path.expanduser().resolve()
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def main(argv: Sequence[str] | None = None) -> int:
    """Run clients and print a row of each; the exit status is the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of clients, or `all`")
    parser.add_argument("--folder", type=Path, help="keep what is installed here; by default in a temporary folder")
    parser.add_argument("--list", action="store_true", help="print the names of all recipes")
    parser.add_argument("--json", action="store_true", help="print everything that is known of a run")
    parser.add_argument("--verbose", action="store_true", help="print requests, and what the client printed")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(recipe_names()))
        return 0
    num_failed = 0
    with open_folder(args.folder) as folder:
        for name in recipe_names() if args.names == ["all"] else args.names:
            try:
                recipe = load_recipe(name)
                install(recipe, folder / name)
            except (ValueError, OSError, subprocess.CalledProcessError) as error:
                print(f"{name}: not installed: {error}", file=sys.stderr)
                num_failed += 1
                continue
            done = run(recipe, folder / name)
            num_failed += bool(done.failures)
            if args.verbose:
                print(done.output)
                print("\n".join(map(describe_exchange, done.log.exchanges)))
            print(json.dumps(done.summary()) if args.json else format_row(done.summary()), flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
