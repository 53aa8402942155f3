"""Trials of grammars before the server compiles them: in a sandbox, in a queue of their own, once for each key."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from hashlib import sha256

from retain.server.preparation import PreparationPool
from retain.server.sandbox import Sandbox

NUM_PLACES = 2  # grammars on trial at once
MAX_KNOWN = 64  # grammars of a key that passed
MAX_KNOWN_SIZE = 2**16  # characters of such a grammar: the digest of a longer one would hold the event loop


class GrammarTrials:
    """Compiles grammars of requests on trial. Templates and tokenizing never wait for it.

    With several keys, a key has half of the places; a lone key has all. What a key has tried and passed is not tried
    again for it. Keys do not share this: the time of a request tells nothing of others' grammars.
    """

    def __init__(self, sandbox: Sandbox, num_keys: int):
        """`num_keys`: API keys that share the server."""
        self._sandbox = sandbox
        self._pool = PreparationPool("grammar", NUM_PLACES, NUM_PLACES // 2 if num_keys > 1 else NUM_PLACES)
        self._passed: defaultdict[str, OrderedDict[bytes, None]] = defaultdict(OrderedDict)  # the newest last

    async def check(self, key_name: str, grammar: str, special_tokens: Sequence[str] = ()) -> None:
        """Raise ValueError if compiling a grammar takes too much time, memory or stack. Raises APIError.

        `special_tokens`: those that the grammar may name.
        """
        passed = self._passed[key_name]
        digest = sha256(grammar.encode()).digest() if len(grammar) <= MAX_KNOWN_SIZE else b""

        def try_grammar() -> None:
            if digest not in passed:  # an equal one may have passed while this one waited
                self._sandbox.check_grammar(grammar, special_tokens)

        if digest not in passed:
            await self._pool.run(key_name, try_grammar)
        if digest:
            passed[digest] = None
            passed.move_to_end(digest)
            if len(passed) > MAX_KNOWN:
                passed.popitem(last=False)

    def close(self) -> None:
        """Accept no more grammars, and wait for none."""
        self._pool.close()
