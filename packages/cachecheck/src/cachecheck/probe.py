"""What a check uses: prompts to ask, and equalities to state. It records a case for each of these."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cachecheck.answer import Answer
from cachecheck.comparison import Difference, compare, find_foreign_words
from cachecheck.http_client import Json
from cachecheck.results import Case, Outcome, SkipCheck
from cachecheck.server import LARGEST_NOISE, Server
from cachecheck.texts import Prompt, PromptSource


class Probe:
    """One run of one check: its texts, and its cases."""

    def __init__(self, server: Server, texts: PromptSource):
        self.server = server
        self.capabilities = server.capabilities
        self.config = server.config
        self.texts = texts
        self.cases: list[Case] = []
        self._pending: list[tuple[Prompt, Answer, str]] = []

    def ask(self, prompt: Prompt, key: int = 0, **fields: Any) -> Answer:
        """Return the answer to a prompt; `fields` are further fields of the request."""
        return self.server.ask(prompt, fields, key)

    def stream(self, prompt: Prompt) -> Answer:
        """Return the answer to a prompt, from the events of a stream."""
        fields: Json = {"stream": True}
        if self.capabilities.streams_usage:
            fields["stream_options"] = {"include_usage": True}
        return self.server.ask(prompt, fields)

    def send(self, path: str, **body: Any) -> None:
        """Send a body to a path of the API, for its effect. Raises RefusedError."""
        self.server.clients[0].post(path, body)

    def ask_together(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Ask all prompts at once."""
        with ThreadPoolExecutor(len(prompts)) as executor:
            return list(executor.map(self.ask, prompts))

    def equal(self, reference: Answer, answer: Answer, what: str) -> bool:
        """State that two answers are equal. Returns whether they are."""
        difference = compare(reference, answer, self.server.tolerance)
        self._record(what, difference, answer)
        return difference is None

    def equal_cold(self, prompt: Prompt, answer: Answer, what: str) -> None:
        """State that an answer is what the prompt's answer is without a cache. It is compared at the check's end."""
        self._pending.append((prompt, answer, what))

    def no_words_of(self, others: Sequence[Prompt], own: Prompt, answer: Answer, what: str) -> None:
        """State that an answer has no words that only other prompts have."""
        words = find_foreign_words(answer, own, others)
        self.judge(words is None, what, f"the answer has {words!r} of another text")

    def not_cached(self, answer: Answer, what: str) -> None:
        """State that nothing of a prompt's text was cached, as far as the server counts it."""
        is_cold = answer.num_cached <= self.capabilities.allowance
        self.judge(is_cold, what, f"{answer.num_cached} of {answer.prompt_tokens} tokens came from the cache")

    def judge(self, holds: bool, what: str, detail: str) -> None:
        """Record a fault with its detail unless a statement holds."""
        self.cases.append(Case(what, Outcome.PASSED) if holds else Case(what, Outcome.FAULT, detail))

    def unsure(self, what: str, why: str) -> None:
        """Record that nothing can be told."""
        self.cases.append(Case(what, Outcome.UNSURE, why))

    def skip_unless(self, condition: Any, why: str) -> None:
        """End the check with a reason unless a condition holds."""
        if not condition:
            raise SkipCheck(why)

    def settle(self) -> None:
        """Ask the cold answers of all pending cases, and compare."""
        pending = self._pending
        self._pending = []
        if pending and self.server.cold.method is None:
            hint = "the server offers neither salts nor a request without a cache; give a --flush-command"
            self.unsure("answers that have no cold reference", f"{len(pending)}: {hint}")
            return
        for i, reference in self.server.cold.ask([prompt for prompt, _, _ in pending], self.texts):
            _, answer, what = pending[i]
            if self.server.cold.has_failed(reference, self.capabilities.allowance):
                self.unsure(what, "the reference came from the cache, too")
            else:
                self.equal(reference, answer, what)

    def _record(self, what: str, difference: Difference | None, answer: Answer) -> None:
        noise = self.server.noise
        if noise.gap > LARGEST_NOISE:
            self.unsure(what, f"repeated requests differ by {noise.gap:.2g} nats")
            return
        if difference is None:
            self.cases.append(Case(what, Outcome.PASSED))
            return
        detail = f"{difference.detail} ({answer.prompt_tokens} tokens, {answer.cached} cached)"
        if noise.turns_tokens and not difference.is_certain:
            self.unsure(what, f"{detail}; repeated requests differ, too")
        else:
            self.cases.append(Case(what, Outcome.FAULT, detail, needs_confirmation=not difference.is_certain))
