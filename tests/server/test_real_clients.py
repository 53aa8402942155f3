"""Real clients, each by its own package: two turns with a call of a tool (tools/clients.py, tools/client_recipes).

A client is run where it is installed: beside the tests, or in the folder of $RETAIN_CLIENTS as `python -m tools.clients
--folder` fills it. The others are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tools import clients

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "clients.md"
MODULES = {"openai-agents": "agents", "pydantic-ai": "pydantic_ai"}  # of the extra `dev`


def find_folder(name: str) -> Path | None:
    """Return the folder in which a client is installed."""
    if folder := os.environ.get("RETAIN_CLIENTS"):
        found = Path(folder).expanduser() / name
        return found if found.exists() else None
    is_here = name in MODULES and importlib.util.find_spec(MODULES[name])
    return Path(sys.prefix) if is_here else None


@pytest.mark.slow
@pytest.mark.parametrize("name", clients.recipe_names())
def test_two_turns_of_a_client(name: str) -> None:
    folder = find_folder(name) or pytest.skip(f"{name} is not installed: python -m tools.clients {name}")
    recipe = clients.load_recipe(name)
    done = clients.run(recipe, folder)
    assert not done.failures, done.output
    first, second = done.turns[:2]
    if recipe.call:  # the other clients change what the first prompt said
        assert second.cached_tokens >= first.prompt_tokens


@pytest.mark.slow
def test_a_client_that_fails_is_told(tmp_path: Path) -> None:
    code = "import httpx; print(httpx.post('{url}/v1/chat/completions', json={}).text)"
    recipe = clients.Recipe("broken", packages=[], version="pytest", commands=[["python", "-c", code], ["false"]])
    done = clients.run(recipe, Path(sys.prefix))
    assert done.failures[:2] == ["exit status 1", "400 POST /v1/chat/completions"]
    assert clients.format_row(done.summary()).count("|") == 7


def test_names_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    for name in clients.recipe_names():
        recipe = clients.load_recipe(name)
        assert recipe.commands and recipe.packages and not any("{" in word.strip("{}") for word in recipe.packages)
    assert clients.main(["no-such-client"]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_every_recipe_is_in_the_guide() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    assert not {name for name in clients.recipe_names() if f"`{name}`" not in " ".join(rows)}
