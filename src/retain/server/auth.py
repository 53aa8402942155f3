"""API keys. Each has a name for people and a salt that keeps its cached prefixes apart from those of other keys."""

from __future__ import annotations

import hmac
import logging
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

API_KEYS_ENV = "RETAIN_API_KEYS"
MIN_KEY_LENGTH = 8
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ApiKey:
    """Name and salt of a key. The salt is derived from the key, so stores on disk still match after a restart.

    An operator may read sums over all keys; a key that is alone may, because they are its own.
    """

    name: str
    salt: str
    is_operator: bool = False


ANONYMOUS = ApiKey("anonymous", "", is_operator=True)


class ApiKeys:
    """The accepted API keys, as digests. An empty set accepts every request."""

    def __init__(self, keys_by_name: Mapping[str, str], operators: Collection[str] = ()):
        """Hash the keys. Raises ValueError for a key that is too short or given twice, or an operator without one."""
        if unknown := set(operators) - keys_by_name.keys():
            raise ValueError(f"no API key is named {min(unknown)!r}, which --operator names")
        for name, key in keys_by_name.items():
            if len(key) < MIN_KEY_LENGTH:
                raise ValueError(
                    f"the API key {name!r} is shorter than {MIN_KEY_LENGTH} characters: choose a longer one"
                )
        self._hashed_keys = [
            (_digest(key), ApiKey(name, _digest(f"salt {key}").hex(), name in operators or len(keys_by_name) == 1))
            for name, key in keys_by_name.items()
        ]
        if len({digest for digest, _ in self._hashed_keys}) < len(self._hashed_keys):
            raise ValueError("two names have the same API key: give each its own")

    def __len__(self) -> int:
        return len(self._hashed_keys)

    def authenticate(self, authorization: str | None) -> ApiKey | None:
        """Return the key of an `Authorization: Bearer KEY` header, or None if it is not accepted.

        Takes the same time for every header, so that timing reveals nothing about the keys.
        """
        if not self._hashed_keys:
            return ANONYMOUS
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        match = None
        for digest, candidate in self._hashed_keys:
            if hmac.compare_digest(digest, given):
                match = candidate
        return match if scheme.lower() == "bearer" else None


def load_api_keys(path: Path | None, environment: Mapping[str, str], operators: Collection[str] = ()) -> ApiKeys:
    """Load keys from a file and from $RETAIN_API_KEYS.

    The file has one key a line: `name key`, or only the key. The variable holds comma-separated `name:key` pairs.
    `operators` are names of keys. Raises ValueError for malformed or missing keys, OSError if the file cannot be read.
    """
    keys_by_name: dict[str, str] = {}
    entries = [line.split() for line in path.read_text().splitlines()] if path else []
    entries += [part.strip().split(":", 1) for part in environment.get(API_KEYS_ENV, "").split(",") if part.strip()]
    for parts in entries:
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) > 2:
            raise ValueError(f"{path}: a line is `name key`, not {len(parts)} words")
        name = parts[0] if len(parts) == 2 else f"key{len(keys_by_name) + 1}"
        if name in keys_by_name:
            raise ValueError(f"two API keys are named {name!r}: rename one")
        keys_by_name[name] = parts[-1]
    if not keys_by_name and (path or API_KEYS_ENV in environment):
        raise ValueError(f"{path or '$' + API_KEYS_ENV} has no API key: add a line `name key`")
    if path and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        log.warning("others can read the API keys in %s (mode %o): chmod 600 %s", path, mode, path)
    return ApiKeys(keys_by_name, operators)


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogatepass")).digest()
