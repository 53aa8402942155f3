"""The adapters (LoRA) of an engine, by the names that requests give. They come and go while it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from retain.engine.request import Adapter
from retain.files import quote
from retain.formats.lora import LoRAAdapter
from retain.models.adapter_bank import AdapterBank


class Adapters:
    """Adapters by name; each has a place in the bank of the engine's program. Without a bank there can be none.

    A place is free when no name and no request has its adapter any more.
    """

    def __init__(self, bank: AdapterBank | None):
        self.bank = bank
        self.named: dict[str, Adapter] = {}
        self.on_write: Callable[[int, LoRAAdapter], None] | None = None  # tells other ranks
        self._places: WeakValueDictionary[int, Adapter] = WeakValueDictionary()

    def add(self, name: str, adapter: LoRAAdapter) -> None:
        """Let requests name an adapter. No step runs meanwhile. Raises ValueError; then nothing has changed."""
        if self.bank is None:
            raise ValueError("the engine has no room for adapters: start it with --lora or --max-loras")
        if not name or name in self.named:
            raise ValueError(f"there is an adapter {quote(name)} already" if name else "an adapter needs a name")
        number = self._find_free_place(self.bank.size)
        self.bank.write(number, adapter)
        if self.on_write:
            self.on_write(number, adapter)
        self.named[name] = self._places[number] = Adapter(number, adapter.digest, adapter.invocation_tokens)

    def remove(self, name: str) -> None:
        """Let no further request name an adapter; others go on with it. Raises ValueError."""
        self.find(name)
        del self.named[name]

    def find(self, name: str) -> Adapter:
        """Return an adapter by its name. Raises ValueError."""
        adapter = self.named.get(name)
        if adapter is None:
            names = ", ".join(map(quote, list(self.named)))  # a copy: another thread may change them
            raise ValueError(f"there is no adapter {quote(name)}: {f'known are {names}' if names else 'there is none'}")
        return adapter

    def _find_free_place(self, size: int) -> int:
        for attempt in range(2):
            free = next((i for i in range(size) if i not in self._places), None)
            if free is not None:
                return free
            if not attempt:
                gc.collect()  # requests that have ended may be part of a cycle
        raise ValueError(f"all {size} places of adapters are taken: see max_loras")


def parse_loras(specs: Sequence[str]) -> dict[str, Path]:
    """Return the folders of adapters by name, of specs such as `name=FOLDER`. Raises ValueError."""
    folders: dict[str, Path] = {}
    for spec in (part for given in specs for part in given.split(",")):
        name, _, folder = spec.partition("=")
        if not (name and folder):
            raise ValueError(f"lora is NAME=FOLDER, not {quote(spec)}")
        if name in folders:
            raise ValueError(f"lora names {quote(name)} twice")
        folders[name] = Path(folder).expanduser()
    return folders
