"""An engine with a KV policy as a model of the lm-eval harness (`pip install lm-eval`; no extra includes it).

from lm_eval import simple_evaluate
simple_evaluate(model=RetainLM(LLM("smollm2"), "h2o:budget=50%"), tasks=["piqa"])
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.model import LM

from retain.llm import LLM
from retain.sampling_params import SamplingParams


class RetainLM(LM):  # type: ignore[misc]
    """A model of lm-eval that runs every request under one policy, `batch_size` of them together."""

    def __init__(self, llm: LLM, kv_policy: str | None = None, batch_size: int = 32):
        super().__init__()
        self.llm = llm
        self.kv_policy = kv_policy
        self.batch_size = batch_size

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return the log-probability of each (context, continuation), and whether greedy decoding would give it."""
        return self._score_pairs([self._encode_pair(*r.args) for r in requests])

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return the log-probabilities of whole texts; a text longer than the context counts up to there."""
        pairs = [self._encode_pair("", *r.args) for r in requests]
        return [
            found
            for found, _ in self._score_pairs([(start, ids[: self.llm.max_model_len - 1]) for start, ids in pairs])
        ]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return generated texts, each up to the stop strings of its task."""
        found: list[str] = []
        for start in range(0, len(requests), self.batch_size):
            group = [r.args for r in requests[start : start + self.batch_size]]
            params = [
                SamplingParams(
                    max_tokens=options.get("max_gen_toks", 256),
                    temperature=options.get("temperature", 0.0) if options.get("do_sample") else 0.0,
                    stop=tuple(options.get("until", ())),
                )
                for _, options in group
            ]
            found += [a.text for a in self.llm.generate([text for text, _ in group], params, self.kv_policy)]
        return found

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return prompt and continuation as ids. Blanks between them belong to the continuation, as in lm-eval."""
        stripped = context.rstrip()
        tokenizer = self.llm.tokenizer
        eos = tokenizer.special_tokens_map.get("eos_token", "")
        empty_prompt = tokenizer.encode("") or tokenizer.encode(eos, add_special_tokens=False)
        prompt = self.llm.encode(stripped) if stripped else empty_prompt
        answer = tokenizer.encode(context[len(stripped) :] + continuation, add_special_tokens=False)
        return prompt[len(answer) - self.llm.max_model_len :], answer

    def _score_pairs(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        found = []
        for start in range(0, len(pairs), self.batch_size):
            group = pairs[start : start + self.batch_size]
            likeliest: list[list[int]] = [[] for _ in group]
            scores = self.llm.score(
                [p for p, _ in group],
                [a for _, a in group],
                self.kv_policy,
                lambda i, logits, likeliest=likeliest: likeliest[i].extend(logits.argmax(-1).tolist()),  # type: ignore[misc]
            )
            for (_, answer), logprobs, greedy in zip(group, scores, likeliest, strict=True):
                found.append((sum(logprobs), greedy == answer))
        return found
