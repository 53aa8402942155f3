"""A model's own tokenizer: text to tokens and back, its chat template, and the tokens that end an answer.

From a GGUF file's metadata or a Hugging Face folder. The work is done by the `tokenizers` library; here it is told
apart what it leaves open. What is not known here: what the tokens are for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retain.processing.chat_template import ChatTemplate, Messages, Tools
from retain.processing.detokenizer import IncrementalDetokenizer, TokenBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

# What models that converse write when it is the other's turn, and GGUF files do not always say.
END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")


class Tokenizer:
    """`vocab_size` ids; `stop_ids` end an answer; `template` is the chat template, where the model has one."""

    def __init__(
        self,
        core: Core,
        path: Path,
        stop_token_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
        special_tokens_map: Mapping[str, str] | None = None,
        bos_ids: Sequence[int] = (),
        eos_ids: Sequence[int] = (),
    ):
        """`path` is for complaints, `tokens` are the texts of bos_token and the like; `bos`, `eos` go around a text."""
        self.path, self.stop_token_ids, self.chat_template = path, stop_token_ids, chat_template
        self._core, self.special_tokens_map, self._bos_ids, self._eos_ids = (
            core,
            dict(special_tokens_map or {}),
            list(bos_ids),
            list(eos_ids),
        )
        self.special_token_ids = frozenset(i for i, t in core.get_added_tokens_decoder().items() if t.special)
        self._token_bytes = TokenBytes(core, self.special_token_ids, *_decoder_options(core))

    @classmethod
    def open(cls, path: Path) -> Tokenizer:
        """The tokenizer of a .gguf file or a Hugging Face folder. Raises ValueError where it is missing or damaged."""
        with wrap_errors(path):
            return _from_folder(path) if path.is_dir() else _from_gguf(path)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return self._core.get_vocab_size()

    def has_same_vocab(self, other: Tokenizer) -> bool:
        """Whether both give every token the same number."""
        mine: dict[str, int] = self._core.get_vocab()
        return mine == other._core.get_vocab()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a raw text. With `ends`, what the model expects around a text (Gemma's bos) is added.

        A special token that is written in the text is that token. Raises ValueError for text that is no Unicode.
        """
        text.encode()  # a lone surrogate fails here, with a ValueError
        with wrap_errors(self.path):  # a tokenizer.json may be damaged in a way that shows only now
            # One text as a batch: then the library lets other threads run meanwhile.
            ids: list[int] = self._core.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return [*self._bos_ids, *ids, *self._eos_ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens; special tokens are left out, broken characters are U+FFFD."""
        return self._token_bytes.decode(b"".join(self._token_bytes[i] for i in ids))

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token."""
        return max((len(self.token_bytes(i)) for i in range(self.vocab_size)), default=1)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, special tokens too. Perhaps not a whole character."""
        return self._token_bytes.raw_bytes(token)

    def create_detokenizer(self, stop: Sequence[str] = ()) -> IncrementalDetokenizer:
        """To decode one answer as it comes, up to the first of the `stop` strings."""
        return IncrementalDetokenizer(self._token_bytes, stop)

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True, tools: Tools | None = None
    ) -> str:
        """A conversation, [{"role": "user", "content": "..."}, ...], as the text that the model knows conversations by.

        Raises ValueError where the model has no template, or the template fails.
        """
        return self._compiled_template.render(messages, add_generation_prompt, tools)

    @cached_property
    def _compiled_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ValueError("this model has no chat template: give it raw text")
        return ChatTemplate(self.chat_template, self.special_tokens_map)

    def encode_chat(
        self, messages: Messages, add_generation_prompt: bool = True, tools: Tools | None = None
    ) -> list[int]:
        """The ids of a conversation. The template writes bos itself, so none is added."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, tools), add_special_tokens=False)

    def count_system_tokens(self, messages: Messages) -> int:
        """How many tokens at the beginning of `encode_chat(messages)` are the system prompt's, whatever is said next.

        Templates differ, so it is asked what stays the same when everything else changes; 0 without a system message.
        """
        if not messages or messages[0].get("role") != "system":
            return 0
        told = [self.encode_chat([messages[0], {"role": "user", "content": said}]) for said in ("0", "A")]
        return next(i for i, (a, b) in enumerate(zip(*told, strict=False)) if a != b)


@contextmanager
def wrap_errors(path: Path) -> Iterator[None]:
    """Whatever goes wrong while a tokenizer is made is one ValueError; also a panic of Rust, which is no Exception."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        if isinstance(e, ValueError) and str(e).startswith(f"{path}"):
            raise
        from retain.formats.gguf.reader import UnsupportedError

        if isinstance(e, UnsupportedError):
            raise UnsupportedError(f"{path}: {e}") from e
        why = str(e).strip().splitlines() or [type(e).__name__]
        raise ValueError(f"{path}: damaged tokenizer: {why[0]}") from e


def _decoder_options(core: Core) -> tuple[bool, bool]:
    """Of which kind the decoder is, as Pieces wants it: whether it is byte level, whether a first space is stripped."""
    decoder = json.loads(core.decoder.__getstate__()) if core.decoder else {"type": "none"}
    steps = decoder.get("decoders", [decoder])
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return True, False
    if names[0] == "Metaspace":
        return False, steps[0].get("prepend_scheme", "always") != "never"
    if steps[0] == {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
        return False, "Strip" in names
    from retain.formats.gguf.reader import UnsupportedError

    raise UnsupportedError(
        f"decoders of type {'+'.join(names)} are not supported: only byte-level and SentencePiece ones are"
    )


def _from_gguf(path: Path) -> Tokenizer:
    from retain.formats.gguf.reader import GGUFReader
    from retain.processing.gguf_tokenizer import LLAMA3_PATTERN, PRE_TOKENIZER_PATTERNS, build_tokenizer

    header = GGUFReader(path)
    meta = header.metadata
    core = build_tokenizer(header)
    words: list[str] = meta["tokenizer.ggml.tokens"]

    def named(name: str) -> int | None:
        token = meta.get(f"tokenizer.ggml.{name}_token_id")
        if token is None or token == 0xFFFFFFFF:  # how old files say that there is none
            return None
        if not isinstance(token, int) or not 0 <= token < len(words):
            raise ValueError(f"the {name} token is {token!r}, of {len(words)} tokens")
        return token

    ids = {name: named(name) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    short = {"unknown": "unk", "padding": "pad"}
    tokens = {f"{short.get(name, name)}_token": words[i] for name, i in ids.items() if i is not None}
    ends = [core.token_to_id(word) for word in END_OF_TURN_TOKENS]
    special = core.get_added_tokens_decoder()
    stops = {ids["eos"], ids["eot"], ids["eom"], *(i for i in ends if i in special and special[i].special)} - {None}
    # Files that do not say: SentencePiece models and Llama 3 begin with bos.
    usual = (
        meta["tokenizer.ggml.model"] == "llama"
        or PRE_TOKENIZER_PATTERNS.get(meta.get("tokenizer.ggml.pre", "default")) is LLAMA3_PATTERN
    )
    add = {
        "bos": meta.get("tokenizer.ggml.add_bos_token", usual),
        "eos": meta.get("tokenizer.ggml.add_eos_token", False),
    }
    bos, eos = ([i] if add[name] and (i := ids[name]) is not None else [] for name in ("bos", "eos"))
    template = meta.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError("its chat template is no text")
    return Tokenizer(core, path, frozenset(i for i in stops if i is not None), template, tokens, bos, eos)


def _from_folder(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Core

    file = path / "tokenizer.json"
    core = Core.from_file(str(file)) if file.is_file() else _convert_slow_tokenizer(path)
    core.no_truncation()  # a training run may have left its limits in the file
    core.no_padding()
    said = _read_json(path / "special_tokens_map.json") | _read_json(path / "tokenizer_config.json")
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = said.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    stops = [core.token_to_id(tokens["eos_token"])] if "eos_token" in tokens else []
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(path / name).get("eos_token_id")
        stops += eos if isinstance(eos, list) else [eos]
    return Tokenizer(
        core, path, frozenset(i for i in stops if isinstance(i, int)), _read_chat_template(path, said), tokens
    )


def _read_chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty where there is no such file."""
    from retain.formats.safetensors import read_json_object

    return read_json_object(path) if path.is_file() else {}


def _convert_slow_tokenizer(path: Path) -> Core:
    """A folder with vocab.json and merges.txt, or tokenizer.model, instead: transformers knows how to convert them."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(f"{path}: has no tokenizer.json; for the older files: pip install transformers") from None
    made = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    core = getattr(made, "backend_tokenizer", None)
    if core is None:
        raise ValueError(f"{path}: has no tokenizer.json, and its tokenizer cannot be made into one")
    return core
