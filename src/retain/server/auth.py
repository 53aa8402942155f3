"""Who may ask: API keys. Each has a name, for people, and a salt, so that no key finds another's prefixes.

What is not known here: requests.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

API_KEYS_ENV = "RETAIN_API_KEYS"


@dataclass(frozen=True)
class ApiKey:
    """`salt` goes before what a request calls its own; it outlives a restart, as a store on a disk does."""

    name: str
    salt: str


ANONYMOUS = ApiKey("anybody", "")


class ApiKeys:
    """Keys as their digests. Without any, anybody may ask."""

    def __init__(self, keys_by_name: Mapping[str, str]):
        """`named`: keys by name. Raises ValueError for one that is too short to be a secret."""
        for name, key in keys_by_name.items():
            if len(key) < 8:
                raise ValueError(f"the API key {name!r} is shorter than 8 characters")
        self._hashed_keys = [
            (_digest(key), ApiKey(name, _digest(f"salt {key}").hex())) for name, key in keys_by_name.items()
        ]
        if len({digest for digest, _ in self._hashed_keys}) < len(self._hashed_keys):
            raise ValueError("two names have the same API key")

    def __bool__(self) -> bool:
        return bool(self._hashed_keys)

    def authenticate(self, authorization: str | None) -> ApiKey | None:
        """Whose `Authorization: Bearer ...` this is. It takes as long whoever it is, and whether it is anybody."""
        if not self._hashed_keys:
            return ANONYMOUS
        kind, _, key = (authorization or "").partition(" ")
        given, found = _digest(key.strip()), None
        for digest, known in self._hashed_keys:
            if hmac.compare_digest(digest, given):
                found = known
        return found if kind.lower() == "bearer" else None


def load_api_keys(path: Path | None, environment: Mapping[str, str]) -> ApiKeys:
    """Keys from a file, one a line, `name key` or only the key; and from $RETAIN_API_KEYS, comma-separated `name:key`.

    Raises ValueError or OSError.
    """
    named: dict[str, str] = {}
    lines = [line.split() for line in path.read_text().splitlines()] if path else []
    lines += [part.strip().split(":", 1) for part in environment.get(API_KEYS_ENV, "").split(",") if part.strip()]
    for parts in lines:
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) > 2:
            raise ValueError(f"{path}: a line is `name key`, not {len(parts)} words")
        name = parts[0] if len(parts) == 2 else f"key{len(named) + 1}"
        if name in named:
            raise ValueError(f"two API keys are named {name!r}")
        named[name] = parts[-1]
    if not named and (path or API_KEYS_ENV in environment):
        raise ValueError(f"{path or '$' + API_KEYS_ENV} has no API key")
    return ApiKeys(named)


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogatepass")).digest()
