"""A GGUF model in several files, as llama.cpp's `llama-gguf-split` writes them: name-00001-of-00003.gguf and so on.

The first part has the metadata of the model. Each part has its own index of tensors, and `split.no`, `split.count` and
`split.tensors.count`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retain.files import quote
from retain.formats.errors import UnsupportedError
from retain.formats.gguf.reader import GGUFReader
from retain.formats.gguf.types import TensorInfo
from retain.kernels.weights.stored_weight import StoredWeight

PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def find_first_part(path: Path) -> Path:
    """Return the path of part 1 of the model that a file is named as a part of; else the file itself."""
    first = part_paths(path)[0]
    return first if first.is_file() else path


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a model, by the name of one; the file itself where it names none."""
    named = PART_NAME.fullmatch(path.name)
    if named is None or not 1 <= int(named[2]) <= int(named[3]):
        return [path]
    return [path.with_name(f"{named[1]}-{i + 1:05}-of-{named[3]}.gguf") for i in range(int(named[3]))]


class SplitReader:
    """Read the parts of a model as one file: `metadata` is that of the first, `tensors` are those of all.

    `path` is that of any part, or of a file that is whole. Raises ValueError for a part that is missing or does not
    belong to the others.
    """

    def __init__(self, path: Path):
        self.first = GGUFReader(find_first_part(path))
        self.path = self.first.path
        self.metadata = self.first.metadata
        self.wrap_errors = self.first.wrap_errors
        with self.wrap_errors():
            count = self.metadata.get("split.count", 0)
            others = self._other_paths(count) if type(count) is int and count > 1 else []
        self._parts = [self.first, *(GGUFReader(other) for other in others)]
        self.tensors: dict[str, TensorInfo] = {}
        for i, part in enumerate(self._parts):
            with part.wrap_errors():
                if others and (part.metadata.get("split.no"), part.metadata.get("split.count")) != (i, count):
                    number, of = (quote(part.metadata.get(f"split.{key}")) for key in ("no", "count"))
                    raise ValueError(f"split.no is {number} and split.count {of}, in part {i} of {count}")
                if both := sorted(part.tensors.keys() & self.tensors.keys()):
                    raise ValueError(f"the tensor {quote(both[0])} is in another part, too")
            self.tensors |= {name: replace(info, part=i) for name, info in part.tensors.items()}
        with self.wrap_errors():
            expected = self.metadata.get("split.tensors.count", len(self.tensors))
            if others and expected != len(self.tensors):
                raise ValueError(f"its parts have {len(self.tensors)} tensors, not {quote(expected)}")

    def tensor_bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, mapped from the part that holds it."""
        return self._parts[info.part].tensor_bytes(info)

    def read_stored(self, name: str, info: TensorInfo) -> StoredWeight:
        """Return a matrix as it lies in its part."""
        return self._parts[info.part].read_stored(name, info)

    def _other_paths(self, count: int) -> list[Path]:
        paths = part_paths(self.path)
        if len(paths) != count:
            raise UnsupportedError(f"one of {count} parts: name each as name-00001-of-{count:05}.gguf, in one folder")
        if missing := [p.name for p in paths if not p.is_file()]:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise UnsupportedError(f"one of {count} parts, beside which are missing: {', '.join(missing[:3])}{more}")
        return paths[1:]
