"""A consumer of KV events, as a router is one, and what it should know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import NamedTuple

from retain.kv.prefix.node import Node
from retain.kv.prefix.radix_tree import RadixTree
from retain.server.observers.kv_events.wire import Event

ALWAYS = {
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "group_idx",
    "kv_cache_spec_kind",
}


class Prefix(NamedTuple):
    """Tokens up to the end of a page, and the digest of their salt."""

    salt: str
    tokens: tuple[int, ...]


class Consumer:
    """Rebuilds what is cached, and checks what consumers rely on."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.prefixes: dict[int, Prefix] = {}  # by number

    def apply(self, events: Iterable[Event]) -> None:
        """Follow events in their order."""
        for event in events:
            if event["type"] == "AllBlocksCleared":
                assert event.keys() == {"type"}
                self.prefixes.clear()
            elif event["type"] == "BlockRemoved":
                assert event.keys() == {"type", "block_hashes", "medium", "group_idx"}
                for number in event["block_hashes"]:
                    del self.prefixes[number]
            else:
                self._store(event)

    def _store(self, event: Event) -> None:
        numbers, parent, size = event["block_hashes"], event["parent_block_hash"], event["block_size"]
        assert event.keys() - {"extra_keys"} == ALWAYS and event["type"] == "BlockStored"
        assert (event["medium"], event["group_idx"], event["kv_cache_spec_kind"]) == ("GPU", 0, "full_attention")
        assert size == self.page_size and len(event["token_ids"]) == size * len(numbers) > 0
        assert len(set(numbers)) == len(numbers) and all(0 < n < 2**64 for n in numbers)
        keys = event.get("extra_keys", [None] * len(numbers))
        assert len(keys) == len(numbers) and not any(keys[1:]) and (parent is None or not keys[0])
        before = Prefix(keys[0][0] if keys[0] else "", ()) if parent is None else self.prefixes[parent]
        for i, number in enumerate(numbers):
            assert number not in self.prefixes
            before = Prefix(before.salt, before.tokens + tuple(event["token_ids"][i * size : (i + 1) * size]))
            self.prefixes[number] = before

    @property
    def content(self) -> set[Prefix]:
        """All prefixes that requests may begin with."""
        return set(self.prefixes.values())


def digest_salt(salt: str) -> str:
    """Return how events name a salt."""
    return blake2b(salt.encode(), digest_size=16).hexdigest() if salt else ""


def tree_content(tree: RadixTree, salt_of_root: Mapping[bytes, str]) -> set[Prefix]:
    """Return the prefixes of whole pages that a tree holds below some of its roots."""
    found, size = set(), tree.block_size

    def visit(node: Node, salt: str, before: tuple[int, ...]) -> None:
        if not node.has_pages:
            return
        text = before + tuple(node.tokens.tolist())
        found.update(Prefix(salt, text[:n]) for n in range(len(before) + size, len(text) + 1, size))
        for child in node.children.values():
            visit(child, salt, text)

    for root_hash, root in tree.roots.items():
        if root_hash in salt_of_root:
            visit(root, digest_salt(salt_of_root[root_hash]), ())
    return found
