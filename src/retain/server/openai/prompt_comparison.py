"""Comparison of a prompt with that of an earlier answer: which part of the request changed, and what it costs.

Anthropic's and OpenAI's APIs answer this question about an id. Only hashes are kept for it, never a text. What became
of the cached tokens is the question of kv/prefix/diagnosis.py; its answer completes this one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from threading import Lock

import numpy as np

from retain.kv.prefix.start import MissReason, PrefixDiagnosis
from retain.kv.text import hash_blocks
from retain.processing.input import GenerateRequest
from retain.sequences import count_common
from retain.server.openai.chat_renderer import RenderedChat
from retain.server.openai.messages import hash_messages, hash_value, iter_texts

BLOCK_SIZE = 32  # tokens of a hash: differences behind the last whole block are too small to matter
MAX_BYTES = 16 << 20  # of what is kept: the prompts of about 7 million tokens
HASH_BYTES = 64  # of one in memory, about
OVERHEAD = 1024  # bytes of the Python objects of a fingerprint
SYSTEM_ROLES = ("system", "developer")


class PromptChange(Enum):
    """Why a prompt could not go on from that of an earlier answer; parts of the request are in the order of blame."""

    SALT = "salt"
    TOOLS = "tools"
    SYSTEM = "system"
    EFFORT = "effort"
    VARIABLES = "variables"  # of the chat template
    MESSAGES = "messages"
    NOT_FOUND = "not_found"  # nothing is known of the earlier answer
    NOT_CACHED = "not_cached"  # the prompt goes on, and the cache had less of it


@dataclass(frozen=True)
class PromptFingerprint:
    """What is kept of a request. `messages`: hashes of the conversation up to each text; `blocks`: of the tokens."""

    parts: Mapping[PromptChange, bytes]
    messages: Sequence[bytes]
    blocks: Sequence[bytes]
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, about."""
        return OVERHEAD + HASH_BYTES * (len(self.messages) + len(self.blocks))


@dataclass(frozen=True)
class PromptComparison:
    """What changed since an earlier prompt, if anything did, and the tokens that could not be used again for it."""

    change: PromptChange | None = None
    num_missed_tokens: int = 0

    def find_change(self, diagnosis: PrefixDiagnosis | None) -> PromptChange | None:
        """Return what changed, or that the cache had less than an unchanged prompt, as the prompt's diagnosis says."""
        if self.change is None and diagnosis and diagnosis.reason.is_miss:
            # Texts that part are what the requests say, and nothing that happened to the cache.
            return None if diagnosis.reason is MissReason.DIVERGED else PromptChange.NOT_CACHED
        return self.change


class PromptFingerprints:
    """The fingerprints of the latest answers, by API key and id, in bounded memory. Threads may share it."""

    def __init__(self, max_bytes: int = MAX_BYTES):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[tuple[str, str], PromptFingerprint] = OrderedDict()
        self._lock = Lock()

    def put(self, key_name: str, answer_id: str, fingerprint: PromptFingerprint) -> None:
        """Keep the fingerprint of a new answer's prompt. The oldest ones make room for it."""
        with self._lock:
            self._kept[key_name, answer_id] = fingerprint
            self.num_bytes += fingerprint.num_bytes
            while self.num_bytes > self.max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self.num_bytes -= oldest.num_bytes

    def compare(self, key_name: str, answer_id: str, current: PromptFingerprint) -> PromptComparison:
        """Compare a prompt with that of an earlier answer of the same key."""
        with self._lock:
            earlier = self._kept.get((key_name, answer_id))
        return compare(earlier, current) if earlier else PromptComparison(PromptChange.NOT_FOUND)


def compare(earlier: PromptFingerprint, current: PromptFingerprint) -> PromptComparison:
    """Compare two prompts. A change that left the tokens as they were is none."""
    num_common = count_common(earlier.blocks, current.blocks)
    if num_common == min(len(earlier.blocks), len(current.blocks)):
        return PromptComparison()
    change = next((part for part, value in earlier.parts.items() if current.parts[part] != value), None)
    num_messages = min(len(earlier.messages), len(current.messages))
    if change is None and count_common(earlier.messages, current.messages) < num_messages:
        change = PromptChange.MESSAGES
    if change is None:  # the end of a prompt, where the template begins an answer, is not repeated before that answer
        return PromptComparison()
    return PromptComparison(change, min(earlier.num_tokens, current.num_tokens) - num_common * BLOCK_SIZE)


def build_fingerprint(chat: RenderedChat, request: GenerateRequest) -> PromptFingerprint:
    """Return the fingerprint of a conversation whose prompt is that of an engine's request."""
    body = chat.body
    leading = list(takewhile(lambda message: message.role in SYSTEM_ROLES, body.messages))
    parts = {
        PromptChange.SALT: request.salt,
        PromptChange.TOOLS: chat.tools,
        PromptChange.SYSTEM: list(iter_texts(leading)),
        PromptChange.EFFORT: body.reasoning_effort,
        PromptChange.VARIABLES: body.template_variables,
    }
    root_hash = hash_value(request.salt)
    return PromptFingerprint(
        {part: hash_value(value) for part, value in parts.items()},
        hash_messages(root_hash, body.messages[len(leading) :]),
        hash_blocks(root_hash, np.asarray(request.prompt, np.int32), BLOCK_SIZE),
        len(request.prompt),
    )
