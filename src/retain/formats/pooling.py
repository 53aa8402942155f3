"""How a model makes one vector of a text, as its files say: sentence-transformers' folders, and GGUF's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retain.files import quote, read_json, read_json_object
from retain.formats.errors import UnsupportedError
from retain.formats.gguf.reader import GGUFReader
from retain.formats.gguf.split import find_first_part

LAST = "last"
MEAN = "mean"
KINDS = (LAST, MEAN)
GGUF_KINDS = {1: MEAN, 3: LAST}  # llama.cpp's pooling types; 0 is none
GGUF_NO_POOLING = 0
FOLDER_KINDS = {"lasttoken": LAST, "mean": MEAN, "mean_tokens": MEAN}


@dataclass(frozen=True)
class Pooling:
    """The state of the last token, or the mean of all; `normalize`: vectors have length 1."""

    kind: str
    normalize: bool = True


def choose_pooling(path: Path, option: str, reader: GGUFReader | None = None) -> Pooling | None:
    """Return how texts become vectors under the option `pooling`; None where the model generates. Raises ValueError.

    `reader`: of a GGUF file that is open already.
    """
    if option == "off":
        return None
    return read_pooling(path, reader) if option == "auto" else Pooling(option)


def read_pooling(path: Path, reader: GGUFReader | None = None) -> Pooling | None:
    """Return what the model file or folder at `path` says; None where it says nothing.

    Raises UnsupportedError for other ways, and ValueError for a damaged file.
    """
    if path.is_dir():
        return _read_folder(path) if (path / "modules.json").is_file() else None
    meta = (reader or GGUFReader(find_first_part(path))).metadata
    kind = meta.get(f"{meta.get('general.architecture')}.pooling_type", GGUF_NO_POOLING)
    if type(kind) is not int or kind not in (GGUF_NO_POOLING, *GGUF_KINDS):
        raise UnsupportedError(
            f"{path}: pooling_type {quote(kind)} is not supported, only mean (1) and last (3) are: "
            "--pooling off loads the model with its head"
        )
    return Pooling(GGUF_KINDS[kind]) if kind else None


def _read_folder(path: Path) -> Pooling | None:
    """Read the modules that sentence-transformers applies behind the model: a pooling, and perhaps a norm."""
    file = path / "modules.json"
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise ValueError(f"{file}: damaged: it is no list of objects")
    folders = {str(m.get("type", "")).rpartition(".")[2]: str(m.get("path", "")) for m in modules}
    if "Pooling" not in folders:
        return None
    if unknown := sorted(set(folders) - {"Transformer", "Pooling", "Normalize"}):
        raise UnsupportedError(f"{file}: a module {quote(unknown[0])} is not supported (--pooling off leaves all out)")
    folder = folders["Pooling"]
    if not folder or {"/", "\\", ".."} & {folder, *folder}:
        raise ValueError(f"{file}: damaged: {quote(folder)} is no folder of the model")
    config = path / folder / "config.json"
    return Pooling(_find_kind(config, read_json_object(config)), "Normalize" in folders)


def _find_kind(file: Path, config: Mapping[str, Any]) -> str:
    """Return the kind that a config of a pooling names: `pooling_mode`, or one flag for each kind."""
    prefix = "pooling_mode_"
    named = config.get("pooling_mode")
    found = [named] if named else [k.removeprefix(prefix) for k, v in config.items() if k.startswith(prefix) and v]
    if len(found) != 1 or not isinstance(found[0], str) or found[0] not in FOLDER_KINDS:
        raise UnsupportedError(f"{file}: pooling {quote(found)} is not supported: only lasttoken and mean are")
    return FOLDER_KINDS[found[0]]
