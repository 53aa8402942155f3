"""A model's tokenizer: encode, decode, the chat template, and the tokens that end an answer.

It comes from a GGUF file's metadata or a Hugging Face folder, and wraps the `tokenizers` library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Core

from retain.files import quote, read_json_object, shorten
from retain.formats.errors import UnsupportedError
from retain.formats.gguf.reader import GGUFReader
from retain.formats.gguf.split import find_first_part
from retain.processing.chat_template import (
    DEFAULT,
    ChatTemplates,
    Messages,
    Tools,
    Variables,
    find_chat_templates,
    read_chat_templates,
    render_unfinished,
)
from retain.processing.detokenizer import IncrementalDetokenizer, TokenBytes
from retain.processing.end_tokens import GGUF_END_KEYS, find_end_tokens
from retain.processing.fill_in_formats import FILL_IN_FORMATS
from retain.processing.gguf_tokenizer import SENTENCEPIECE_MODELS, build_tokenizer, lists_merges, read_pre_tokenizers
from retain.processing.reasoning import Reasoning
from retain.processing.stop_strings import StopStrings


class Tokenizer:
    """Convert texts to token ids and back, and render conversations by chat templates.

    `stop_token_ids` end an answer. `chat_templates` are the model's own, or those that were chosen instead.
    """

    def __init__(
        self,
        core: Core,
        path: Path,
        stop_token_ids: frozenset[int] = frozenset(),
        chat_templates: Mapping[str, str] | None = None,
        special_tokens_map: Mapping[str, str] | None = None,
        bos_ids: Sequence[int] = (),
        eos_ids: Sequence[int] = (),
    ):
        """`path` is for error messages. `special_tokens_map` maps bos_token and the like to their texts.

        `stop_token_ids` are those that the files name. Added tokens whose names say so end an answer too, and count
        as special. `chat_templates` are sources by name (see ChatTemplates). `encode` puts `bos_ids` before and
        `eos_ids` after a text.
        """
        added = core.get_added_tokens_decoder()
        ends = find_end_tokens({token.content: i for i, token in added.items()})
        self.path = path
        self.stop_token_ids = stop_token_ids | ends
        self.special_tokens_map = dict(special_tokens_map or {})
        self.special_token_ids = ends | {i for i, token in added.items() if token.special}
        self.chat_templates = ChatTemplates(chat_templates or {}, self.special_tokens_map)
        self._core = core
        self._bos_ids = list(bos_ids)
        self._eos_ids = list(eos_ids)
        self._token_bytes = _create_token_bytes(core, self.special_token_ids)

    @classmethod
    def open(cls, path: Path, reader: GGUFReader | None = None) -> Tokenizer:
        """Open the tokenizer of a .gguf file or a Hugging Face folder. Raises ValueError if missing or damaged.

        `reader`: of a GGUF file that is open already.
        """
        with wrap_errors(path):
            if path.is_dir():
                return _from_folder(path)
            return _from_gguf(path, reader or GGUFReader(find_first_part(path)))

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens."""
        return self._core.get_vocab_size()

    def has_same_vocab(self, other: Tokenizer) -> bool:
        """Return whether both tokenizers map the same tokens to the same ids."""
        return bool(self._core.get_vocab() == other._core.get_vocab())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with the model's bos and eos (Gemma has a bos).

        The text of a special token becomes that token. Raises ValueError for a lone surrogate.
        """
        ids = self._encode_with(self._core, text, add_special_tokens)
        return [*self._bos_ids, *ids, *self._eos_ids] if add_special_tokens else ids

    def _encode_with(self, core: Core, text: str, add_special_tokens: bool = False) -> list[int]:
        text.encode()  # raises ValueError for a lone surrogate
        with wrap_errors(self.path):  # some damage to a tokenizer.json shows only here
            # A batch of one text, because the library releases the GIL for batches.
            ids: list[int] = core.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Return the token ids of a text that continues another: unlike a text's start, it gets no space before it."""
        return self._encode_behind(text, lambda t: self.encode(t, add_special_tokens=False))

    def encode_quoted(self, text: str) -> list[int]:
        """Return the token ids of a text as `encode` without special tokens: their names in it are text, too.

        It is for what somebody else wrote, beside markers that we write.
        """
        ids = self.encode(text, add_special_tokens=False)
        # The other tokenizer takes a while to build, and most texts need none.
        return ids if self._markers.isdisjoint(ids) else self._encode_with(self._quoting_core, text)

    def encode_quoted_continuation(self, text: str) -> list[int]:
        """Return the token ids of a text that continues another, and is quoted."""
        return self._encode_behind(text, self.encode_quoted)

    def _encode_behind(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        ids = encode(text)
        if not self._token_bytes.strip_space:
            return ids
        line, after_line = (encode(t) for t in ("\n", f"\n{text}"))
        return after_line[len(line) :] if after_line[: len(line)] == line else ids

    @cached_property
    def _markers(self) -> frozenset[int]:
        """The tokens that no text of a user is: special ones, and those that fill in the middle, whatever a file says.

        The others that were added are words, such as several spaces.
        """
        return self.special_token_ids | self.find_tokens([name for names in FILL_IN_FORMATS for name in names])

    @cached_property
    def _quoting_core(self) -> Core:
        """The same tokenizer, to which markers in a text are text."""
        description = json.loads(self._core.to_str())
        for token in description["added_tokens"]:
            token["special"] = token["id"] in self._markers
        if description["model"]["type"] == "Unigram":  # markers are pieces like others
            pieces = description["model"]["vocab"]  # without tokens that were added behind it
            for i in self._markers:
                if i < len(pieces):
                    pieces[i][1] = -1e9
        core = Core.from_str(json.dumps(description))
        core.encode_special_tokens = True  # as text, that is
        return core

    def find_offsets(self, text: str) -> list[int]:
        """Return for each token of `encode(text)` where its part of the text begins, in characters.

        Each part ends where the next begins. That of a token which `encode` adds is empty. Of a character that is split
        into several tokens, the last has all.
        """
        encoding = self._core.encode_batch([text])[0]
        spans = [span if span[1] > 0 else None for span in encoding.offsets]  # None: added
        starts = [span[0] for span in spans if span] + [len(text)]
        offsets = [0] * len(self._bos_ids)
        end = 0
        num_seen = 0
        for span in [*spans, *(None for _ in self._eos_ids)]:
            offsets.append(end)
            if span:
                num_seen += 1
                # A span may lack a space at its beginning, which is the token's all the same.
                end = max(end, min(span[1], starts[num_seen]))
        return offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens without special tokens. Broken characters become U+FFFD."""
        return self._token_bytes.decode(b"".join(self._token_bytes[i] for i in ids))

    def decode_raw(self, ids: Iterable[int]) -> str:
        """Return the text of some tokens, special ones included. Broken characters become U+FFFD."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode(errors="replace")

    @cached_property
    def max_token_bytes(self) -> int:
        """Return the number of bytes of the longest token."""
        return max((len(self.token_bytes(i)) for i in range(self.vocab_size)), default=1)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, special tokens included. They may be part of a character."""
        return self._token_bytes.raw_bytes(token)

    def find_tokens(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the tokens of these texts, as far as the vocabulary has them."""
        ids = (self._core.token_to_id(text) for text in texts)
        return frozenset(i for i in ids if i is not None)

    def find_special_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the special tokens that occur in these texts, by their own text."""
        found = {i for text in texts for i in self.encode(text, add_special_tokens=False)}
        return {self.token_bytes(i).decode(errors="replace"): i for i in sorted(found & self.special_token_ids)}

    def create_detokenizer(
        self,
        stop: StopStrings | None = None,
        preceding: Sequence[int] = (),
        min_tokens: int = 0,
        shown: frozenset[int] = frozenset(),
        reasoning: Reasoning | None = None,
    ) -> IncrementalDetokenizer:
        """Create a detokenizer of an answer to the tokens `preceding`.

        It stops at the first of the `stop` strings that is complete after the first `min_tokens` tokens and behind the
        `reasoning`. The special tokens `shown` are part of the text.
        """
        token_bytes = self._token_bytes.showing(shown) if shown else self._token_bytes
        return IncrementalDetokenizer(token_bytes, stop, preceding, min_tokens, reasoning)

    @property
    def chat_template(self) -> str | None:
        """The source of the template for conversations without tools; None where there is none."""
        return self.chat_templates.sources.get(DEFAULT)

    def choose_chat_template(self, source: str | None = None, name: str | None = None) -> None:
        """Compile the chat templates; a given one, or one of them by its name, replaces all. Raises ValueError."""
        try:
            self.chat_templates = self.chat_templates.choose(source, name)
        except ValueError as e:
            hint = " (--chat-template gives another)" if source is None and name is None else ""
            raise ValueError(f"{self.path}: {e}{hint}") from e

    def apply_chat_template(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        continue_final_message: bool = False,
        variables: Variables | None = None,
    ) -> str:
        """Return a conversation, [{"role": "user", "content": "..."}, ...], as prompt text.

        `continue_final_message`: end inside of the last message instead of beginning an answer. `variables` are others
        that the template reads, such as `enable_thinking`; None leaves one to the template. Raises ValueError when the
        model has no template, or the template fails.
        """
        given = {name: value for name, value in (variables or {}).items() if value is not None}
        templates = self.chat_templates
        if continue_final_message:
            return render_unfinished(lambda begun: templates.render(begun, False, tools, given), messages)
        return templates.render(messages, add_generation_prompt, tools, given)

    def encode_chat(
        self, messages: Messages, add_generation_prompt: bool = True, tools: Tools | None = None
    ) -> list[int]:
        """Return the token ids of a conversation. No bos is added, because templates write it themselves."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, tools), add_special_tokens=False)

    def encode_next_turn(self, content: str) -> list[int]:
        """Return the ids that lead from the start of an answer, left empty, over a user's message to the next answer.

        Without a chat template, or with one that rewrites earlier messages, the message is a paragraph of its own.
        """
        if self.chat_template is not None:
            start = [{"role": "user", "content": "A"}]
            turn = [{"role": "assistant", "content": "B"}, {"role": "user", "content": content}]
            before = self.apply_chat_template(start)
            after = self.apply_chat_template([*start, *turn])
            if after.startswith(f"{before}B"):
                return self.encode_continuation(after[len(before) + 1 :])
        return self.encode_continuation(f"\n\n{content}\n\n")

    def count_system_tokens(self, messages: Messages) -> int:
        """Return how many leading tokens of `encode_chat(messages)` belong to the system prompt; 0 without one.

        Templates differ, so this compares two conversations with different user messages.
        """
        if not messages or messages[0].get("role") != "system":
            return 0
        first, second = (self.encode_chat([messages[0], {"role": "user", "content": text}]) for text in ("0", "A"))
        return next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)


@contextmanager
def wrap_errors(path: Path) -> Iterator[None]:
    """Turn errors inside the block into a one-line ValueError; panics of Rust too, which are not an Exception."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        if isinstance(e, ValueError) and str(e).startswith(f"{path}"):
            raise
        if isinstance(e, UnsupportedError):
            raise UnsupportedError(f"{path}: {e}") from e
        reason = str(e).strip().splitlines() or [type(e).__name__]
        raise ValueError(f"{path}: damaged tokenizer: {shorten(reason[0])}") from e


def _create_token_bytes(core: Core, special_token_ids: frozenset[int]) -> TokenBytes:
    """Create the TokenBytes for the kind of the tokenizer's decoder. Raises UnsupportedError for other kinds."""
    decoder = json.loads(core.decoder.__getstate__()) if core.decoder else {"type": "none"}
    steps = decoder.get("decoders", [decoder])
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return TokenBytes(core, special_token_ids, byte_level=True, strip_space=False)
    if names[0] == "Metaspace":
        strip_space = steps[0].get("prepend_scheme", "always") != "never"
        return TokenBytes(core, special_token_ids, byte_level=False, strip_space=strip_space)
    if steps[0] == {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
        return TokenBytes(core, special_token_ids, byte_level=False, strip_space="Strip" in names)
    raise UnsupportedError(
        f"decoders of type {'+'.join(names)} are not supported: only byte-level and SentencePiece ones are"
    )


def _from_gguf(path: Path, reader: GGUFReader) -> Tokenizer:
    meta = reader.metadata
    core = build_tokenizer(reader)
    tokens: list[str] = meta["tokenizer.ggml.tokens"]

    def get_token_id(name: str) -> int | None:
        token_id = meta.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None or token_id == 0xFFFFFFFF:  # the value for "none" in old files
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ValueError(f"the {name} token is {quote(token_id)}, of {len(tokens)} tokens")
        return token_id

    names = {"bos": "bos", "unk": "unknown", "pad": "padding", **{key: key for key in GGUF_END_KEYS}}
    ids = {name: token_id for name, key in names.items() if (token_id := get_token_id(key)) is not None}
    # By default, SentencePiece models begin with bos, and some others (Llama 3, Mistral). Gemma 4 always does: early
    # files deny it, and llama.cpp overrules them.
    is_sentencepiece = meta["tokenizer.ggml.model"] in SENTENCEPIECE_MODELS
    default_add_bos = is_sentencepiece or read_pre_tokenizers()[meta.get("tokenizer.ggml.pre", "default")].adds_bos
    add_bos = lists_merges(meta) or meta.get("tokenizer.ggml.add_bos_token", default_add_bos)
    add_eos = meta.get("tokenizer.ggml.add_eos_token", False)
    return Tokenizer(
        core,
        path,
        stop_token_ids=frozenset(ids[key] for key in GGUF_END_KEYS if key in ids),
        chat_templates=find_chat_templates(meta),
        special_tokens_map={f"{name}_token": tokens[i] for name, i in ids.items()},
        bos_ids=[ids["bos"]] if add_bos and "bos" in ids else [],
        eos_ids=[ids["eos"]] if add_eos and "eos" in ids else [],
    )


def _from_folder(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    core = Core.from_file(str(file)) if file.is_file() else _convert_slow_tokenizer(path)
    core.no_truncation()  # the file may contain limits of a training run
    core.no_padding()
    config = _read_json(path / "special_tokens_map.json") | _read_json(path / "tokenizer_config.json")
    special_tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special_tokens[name] = token
    stop_ids = [core.token_to_id(special_tokens["eos_token"])] if "eos_token" in special_tokens else []
    model_config = _read_json(path / "config.json")
    for source in (_read_json(path / "generation_config.json"), model_config, model_config.get("text_config")):
        eos = source.get("eos_token_id") if isinstance(source, dict) else None
        stop_ids += eos if isinstance(eos, list) else [eos]
    return Tokenizer(
        core,
        path,
        stop_token_ids=frozenset(i for i in stop_ids if isinstance(i, int)),
        chat_templates=read_chat_templates(path, config),
        special_tokens_map=special_tokens,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty where the file is missing. Raises ValueError."""
    return read_json_object(path) if path.is_file() else {}


def _convert_slow_tokenizer(path: Path) -> Core:
    """Convert a folder with vocab.json and merges.txt, or tokenizer.model, by transformers. Raises ValueError."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(f"{path}: has no tokenizer.json; to convert older formats: pip install transformers") from None
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        raise ValueError(f"{path}: has no tokenizer.json, and its tokenizer cannot be converted to one")
    return core
