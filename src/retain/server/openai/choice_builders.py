"""Build the choices of completions and chat completions: one builder for each choice, full or in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple
from uuid import uuid4

from retain.engine.request import FinishReason, Logprob
from retain.processing.tokenizer import Tokenizer
from retain.server.openai.chat_output import ChatOutputParser
from retain.server.openai.protocol import Json
from retain.server.request_group import OutputDelta
from retain.server.tool_format import ParsedToolCall


class ChoiceBuilder:
    """Accumulates the deltas of one choice and builds its JSON."""

    def __init__(self, tokenizer: Tokenizer, index: int, wants_logprobs: bool):
        self.tokenizer = tokenizer
        self.index = index
        self.wants_logprobs = wants_logprobs
        self.text_deltas: list[str] = []
        self.num_tokens = 0
        self.logprobs: list[Logprob] = []
        self.finish_reason: FinishReason | None = None

    def update(self, delta: OutputDelta) -> None:
        """Add newly generated text, its log-probabilities and the finish reason to the choice."""
        self.text_deltas.append(delta.text)
        self.num_tokens += len(delta.token_ids)
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason

    def build(self) -> Json:
        """Build the choice of a full response from all deltas."""
        raise NotImplementedError

    def build_chunks(self, delta: OutputDelta) -> list[Json]:
        """Add a delta and build the choices of the stream events for it; none if it adds nothing visible."""
        raise NotImplementedError

    @property
    def finish_reason_str(self) -> str | None:
        """The finish reason as OpenAI names it, or None while unfinished."""
        return self.finish_reason.value if self.finish_reason else None

    def token_text(self, token_id: int) -> str:
        """Decode one token, with replacement characters for incomplete UTF-8."""
        return self.tokenizer.token_bytes(token_id).decode(errors="replace")


class CompletionChoiceBuilder(ChoiceBuilder):
    """Builds one choice of the answer of /v1/completions.

    `echo`: the prompt, if it is to precede the text. `prompt_only` (max_tokens 0): leave out the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        wants_logprobs: bool,
        prompt_token_ids: Sequence[int],
        echo: EchoedPrompt | None = None,
        prompt_only: bool = False,
    ):
        super().__init__(tokenizer, index, wants_logprobs)
        self.echo = echo
        self.prompt_only = prompt_only
        self._text_length = len(echo.text) if echo else 0  # of what is shown
        self._offsets = TextOffsets(tokenizer, prompt_token_ids, self._text_length)
        self._located: deque[tuple[Logprob, int]] = deque()  # with its token's offset; not yet built
        self._prompt_logprobs: Sequence[Logprob] = ()
        self._echoed = False

    def update(self, delta: OutputDelta) -> None:
        """Add newly generated text to the choice, unless only the prompt is wanted."""
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        if self.prompt_only:
            delta = OutputDelta(delta.index, "", finish_reason=delta.finish_reason)
        super().update(delta)
        self._text_length += len(delta.text)
        if self.wants_logprobs:
            self._located += [(p, self._offsets.add_token(p.token_id)) for p in delta.logprobs]

    def build_chunks(self, delta: OutputDelta) -> list[Json]:
        """Add a delta and build its chunk, after the prompt's chunk at the first delta."""
        chunks = []
        if not self._echoed:
            self._prompt_logprobs = delta.prompt_logprobs
            chunks = [self._build_echo(self.echo)] if self.echo else []
            self._echoed = True
        self.update(delta)
        text = "" if self.prompt_only else delta.text
        located = self._take_located()
        if text or delta.finish_reason or located:
            chunk = self._choice_json(text, self.finish_reason_str)
            if self.wants_logprobs:
                chunk["logprobs"] = self._logprobs_json(located)
            chunks.append(chunk)
        return chunks

    def build(self) -> Json:
        """Build the choice from all deltas, after the prompt if it is to be echoed."""
        choice = self._choice_json("".join(self.text_deltas), self.finish_reason_str)
        if self.wants_logprobs:
            choice["logprobs"] = self._logprobs_json(self._take_located())
        if self.echo:
            echo = self._build_echo(self.echo)
            choice["text"] = echo["text"] + choice["text"]
            if self.wants_logprobs:
                choice["logprobs"] = {k: v + choice["logprobs"][k] for k, v in echo["logprobs"].items()}
        return choice

    def _take_located(self) -> list[tuple[Logprob, int]]:
        """Return tokens whose offset is certain: a stop string may still cut text that is not shown."""
        taken = []
        while self._located and (self.finish_reason or self._located[0][1] <= self._text_length):  # offsets ascend
            logprob, offset = self._located.popleft()
            taken.append((logprob, min(offset, self._text_length)))
        return taken

    def _build_echo(self, echo: EchoedPrompt) -> Json:
        """Build a choice of the prompt. Its first token has no log-probability."""
        chunk = self._choice_json(echo.text, None)
        if self.wants_logprobs:
            rest = self._logprobs_json(list(zip(self._prompt_logprobs, echo.offsets[1:], strict=True)))
            first = {"tokens": self.token_text(echo.token_ids[0]), "text_offset": echo.offsets[0]}
            chunk["logprobs"] = {key: [first.get(key), *values] for key, values in rest.items()}
        return chunk

    def _choice_json(self, text: str, finish_reason: str | None) -> Json:
        return {"index": self.index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _logprobs_json(self, located: Sequence[tuple[Logprob, int]]) -> Json:
        out: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for p, offset in located:
            token = self.token_text(p.token_id)
            # Reversed, so that of two tokens with the same text the likelier one stays.
            top = {self.token_text(t): logprob for t, logprob in reversed(p.top_logprobs)}
            out["tokens"].append(token)
            out["token_logprobs"].append(p.logprob)
            out["top_logprobs"].append(top or {token: p.logprob})
            out["text_offset"].append(offset)
        return out


class ChatChoiceBuilder(ChoiceBuilder):
    """A choice of /v1/chat/completions."""

    def __init__(self, tokenizer: Tokenizer, index: int, wants_logprobs: bool, parser: ChatOutputParser):
        super().__init__(tokenizer, index, wants_logprobs)
        self._parser = parser
        self._num_tool_calls = 0
        self._has_started = False

    def build_chunks(self, delta: OutputDelta) -> list[Json]:
        """Add a delta and build its chunk."""
        self.update(delta)
        reasoning, text, calls = self._parser.feed(delta.text, self.finish_reason is not None)
        fields: Json = {} if self._has_started else {"role": "assistant", "content": ""}
        if reasoning:
            fields["reasoning_content"] = reasoning
        if text:
            fields["content"] = text
        if calls:
            fields["tool_calls"] = [
                {"index": self._num_tool_calls + i, **_tool_call_json(call)} for i, call in enumerate(calls)
            ]
            self._num_tool_calls += len(calls)
        if not fields and not delta.finish_reason and not delta.logprobs:
            return []
        self._has_started = True
        return [self._choice_json({"delta": fields}, delta.logprobs)]

    def build(self) -> Json:
        """Build the choice from all deltas."""
        reasoning, text, calls = self._parser.feed("".join(self.text_deltas), finished=True)
        self._num_tool_calls = len(calls)
        message: Json = {"role": "assistant", "content": None if calls and not text.strip() else text, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_tool_call_json(call) for call in calls]
        return self._choice_json({"message": message}, self.logprobs)

    def _choice_json(self, payload: Json, logprobs: Sequence[Logprob]) -> Json:
        content = [to_token_logprob(self.tokenizer, p) for p in logprobs]
        reason = self.finish_reason_str
        if self._num_tool_calls and self.finish_reason is FinishReason.STOP:
            reason = "tool_calls"
        return {
            "index": self.index,
            **payload,
            "logprobs": {"content": content, "refusal": None} if self.wants_logprobs else None,
            "finish_reason": reason,
        }


def _tool_call_json(call: ParsedToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


class TextOffsets:
    """Finds the offset of each token of a text that grows, `start` characters after the text of `preceding` tokens."""

    def __init__(self, tokenizer: Tokenizer, preceding: Sequence[int] = (), start: int = 0):
        self._detokenizer = tokenizer.create_detokenizer(preceding=preceding)
        self.length = start

    def add_token(self, token: int) -> int:
        """Add a token, and return its offset in characters."""
        offset = self.length
        self.length += len(self._detokenizer.add_token(token))
        return offset


class EchoedPrompt(NamedTuple):
    """A prompt as an answer repeats it: its text, and the offset of each of its tokens."""

    token_ids: Sequence[int]
    text: str
    offsets: Sequence[int]


def echo_text(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> EchoedPrompt:
    """Return a prompt that was sent as text: it stays as it is, whatever its tokens show."""
    return EchoedPrompt(token_ids, text, tokenizer.find_offsets(text))


def echo_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], is_whole_text: bool) -> EchoedPrompt:
    """Return a prompt that was sent as token ids: the text that they show.

    A character that is incomplete at the end is left to the answer, unless the prompt `is_whole_text`.
    """
    detokenizer = tokenizer.create_detokenizer()
    length = 0
    offsets: list[int] = []
    for token in token_ids:
        offsets.append(length)
        length += len(detokenizer.add_token(token))
    if is_whole_text:
        detokenizer.flush()
    return EchoedPrompt(token_ids, detokenizer.text, offsets)


def to_token_logprob(tokenizer: Tokenizer, p: Logprob) -> Json:
    """Return the log-probability of a token and of its most likely alternatives."""
    top = [_to_json(tokenizer, token_id, logprob) for token_id, logprob in p.top_logprobs]
    return {**_to_json(tokenizer, p.token_id, p.logprob), "top_logprobs": top}


def _to_json(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}
