"""`retain cache why`: recorded requests are explained in order, without the model; bad input gives one line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from prefix_doctor.__main__ import main
from tests.helpers.cli import assert_one_line_error, run_cli


def body(system: str, question: str = "Hi", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, **fields}


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("find", "buy")]
REQUESTS = [
    (body("Be brief. It is 10:31."), "first_text"),
    (body("Be brief. It is 10:42."), "date_or_id"),
    (body("Be brief. It is 10:31.", "Hello"), "other_text"),
    ({"custom_id": "7", "body": body("Be brief.  It is 10:31.")}, "white_space"),
    (body("Be brief. It is 10:31.", kv_policy="ring:window=64"), "policy"),
    (body("Be brief. It is 10:31.", kv_policy="h2o:budget=64"), "own_policy"),
    (body("Be brief. It is 10:31.", cache_salt="x", seen_elsewhere=1), "first_text"),
    (body("Be kind.", cache_salt="y", kv_policy="h2o:budget=64"), "first_text"),
    (body("Be kind.", cache_salt="y"), "never_kept"),
    ({"prompt": ["Be brief.", "Be brief and kind."]}, "template"),
    (body("Be brief. It is 10:31."), "complete"),
]


def why(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    return run_cli(capsys, "cache", "why", *args)


def write_lines(path: Path, bodies: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, bodies)) + "\n\n")
    return path


def test_json_lines_are_explained_in_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = write_lines(tmp_path / "log.jsonl", [b for b, _ in REQUESTS])
    code, out, err = why(capsys, file, "--model", "smollm2", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and not err and len(found) == len(REQUESTS) + 1  # one body has two prompts
    causes = [f["cause"] for f in found]
    assert causes == [*(cause for _, cause in REQUESTS[:10]), "other_text", "complete"]
    assert (found[1]["nearest"], found[3]["nearest"]) == (f"{file}:1", f"{file}:3")  # the newest of equals
    assert found[1]["prompt_text"].startswith("42.") and found[1]["nearest_text"].startswith("31.")
    assert found[2]["cached_tokens"] == found[2]["common_tokens"] > 12
    text = why(capsys, file, "--model", "smollm2").out
    assert f"{file}:2: " in text and "date_or_id" in text and text.splitlines()[-1].startswith("12 prompts: ")


def test_a_body_a_list_and_a_text_are_files_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, many, text = tmp_path / "one.json", tmp_path / "many.json", tmp_path / "prompt.txt"
    one.write_text(json.dumps(body("Be brief."), indent=2))
    many.write_text(json.dumps([body("Be brief."), body("Be brief.", "Hello")]))
    text.write_text("Once upon a time")
    out = why(capsys, one, many, text, "--model", "smollm2", "--json").out
    found = [json.loads(line) for line in out.splitlines()]
    assert [f["cause"] for f in found] == ["first_text", "complete", "other_text", "template"]
    assert [f["request"] for f in found] == [str(one), f"{many}[0]", f"{many}[1]", str(text)]


def test_a_conversation_continues_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = body("Be brief.")
    turns = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    second = {"messages": [*first["messages"], *turns]}
    out = why(capsys, write_lines(tmp_path / "x", [first, second]), "--model", "smollm2", "--json").out
    found = json.loads(out.splitlines()[1])
    assert (found["cause"], found["is_miss"], found["nearest_text"]) == ("new_text", False, "")


def test_a_body_is_rendered_as_the_server_does_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With the fields that change the prompt, beside the messages."""
    fields = [{}, {"add_generation_prompt": False}, {"continue_final_message": True, "add_generation_prompt": False}]
    lengths = []
    for given in fields:
        file = write_lines(tmp_path / "x", [body("Be brief.", **given)])
        found = json.loads(why(capsys, file, "--model", "smollm2", "--json").out)
        lengths.append(found["computed_tokens"])
    assert lengths[0] > lengths[1] > lengths[2]


def bad_files() -> list[tuple[str | bytes, str]]:
    return [
        ("", "empty"),
        (b"caf\xe9", "UTF-8"),
        ('{"messages": [', ":1 is not JSON"),
        (json.dumps(body("x")) + "\n{oops}", ":2 is not JSON"),
        ('{"model": "x"}', "neither messages nor a prompt"),
        ("[{}, 3]", "[0]: neither"),
        ('{"messages": []}', "messages: "),
        ('{"messages": [{"role": "user"}]}', "content"),
        ('{"prompt": [99999999]}', "outside the vocabulary"),
        ('{"prompt": "x", "kv_policy": "lru"}', "unknown KV policy"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": ' + json.dumps(TOOLS) + "}", "tools"),
        ('{"a":' * 100_000, "nested too deeply"),
    ]


@pytest.mark.parametrize(("data", "word"), bad_files())
def test_a_bad_file_gives_one_line(
    data: str | bytes, word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "requests"
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    result = why(capsys, file, "--model", "smollm2")
    assert_one_line_error(result._replace(out=""), word)
    assert str(file) in result.err


def test_bad_arguments_give_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = write_lines(tmp_path / "x", [body("Be brief.")])
    assert_one_line_error(why(capsys, file), "--model")
    assert_one_line_error(why(capsys, file, "--model", "smollm3"), "smollm3")
    assert_one_line_error(why(capsys, file, "--model", "smollm2", "--kv-policy", "lru"), "lru")
    assert_one_line_error(why(capsys, tmp_path / "none", "--model", "smollm2"), "none")
    assert_one_line_error(why(capsys, tmp_path, "--model", "smollm2"), str(tmp_path))
    assert_one_line_error(why(capsys, "--model", "smollm2"), "FILE")
    assert_one_line_error(why(capsys, file, "--model", "gemma3"), "chat template")


def test_the_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("protocol", "chat_protocol", "messages"):
        monkeypatch.delitem(sys.modules, f"retain.server.openai.{module}", raising=False)
    for module in ("command", "recorded"):
        monkeypatch.delitem(sys.modules, f"prefix_doctor.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    file = write_lines(tmp_path / "x", [body("Be brief.")])
    assert_one_line_error(why(capsys, file, "--model", "smollm2"), "pip install 'retain[serve]'")


def test_a_retain_without_the_doctor_says_where_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("retain.cli.cache.find_spec", lambda name: None)
    file = write_lines(tmp_path / "x", [body("Be brief.")])
    assert_one_line_error(why(capsys, file, "--model", "smollm2"), "pip install packages/prefix_doctor")


# ---- answers of a server ---------------------------------------------------------------------------------------------

PREFIX = {
    **{"cached_tokens": 20, "computed_tokens": 80, "is_miss": True, "cause": "diverged", "detail": "", "age_s": None},
    **{"common_tokens": 20, "known_tokens": 20},
    **{"before": "It is 10:", "prompt_text": "42. Be brief.", "nearest_text": "31. Be brief."},
}


def test_answers_of_a_server_are_explained_without_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Those of several choices, and of the other APIs, too; by the command of the package as by retain's."""
    evicted = PREFIX | {"cause": "evicted", "age_s": 7.4, "detail": "ram"}
    file = write_lines(tmp_path / "answers", [{"retain": [{"prefix": PREFIX}] * 2}, {"retain": {"prefix": evicted}}])
    result = why(capsys, file, "--json")
    found = [json.loads(line) for line in result.out.splitlines()]
    assert [f["cause"] for f in found] == ["date_or_id", "date_or_id", "evicted"]
    assert found[0] == PREFIX | {
        **{"request": f"{file}:1", "nearest": None, "reason": "diverged", "cause": "date_or_id"},
        "explanation": found[0]["explanation"],
    }
    assert "evicted 7 s ago (ram)" in found[2]["explanation"]
    assert run_cli(capsys, file, "--json", main=main) == result
    text = why(capsys, file).out
    assert "the nearest text with '31. Be brief.'" in text and text.splitlines()[-1].startswith("3 prompts: 60 of 300")


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        ({"retain": []}, "explain_prefix"),
        ({"retain": [{"kv": 1}]}, "explain_prefix"),
        ({"retain": [{"prefix": 3}]}, "not an object"),
        ({"retain": [{"prefix": {**PREFIX, "before": 3}}]}, "no before"),
        ({"retain": [{"prefix": {**PREFIX, "age_s": "3"}}]}, "no age_s"),
        ({"retain": [{"prefix": {**PREFIX, "cause": "magic"}}]}, "magic"),
    ],
)
def test_a_bad_answer_gives_one_line(
    answer: Any, word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert_one_line_error(why(capsys, write_lines(tmp_path / "x", [answer])), word)
