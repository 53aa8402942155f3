"""Content blocks of requests in Anthropic's format, and their text in the prompt.

Blocks that this server never makes come from conversations that began elsewhere: they become text where they have any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from retain.server.client_fields import read_refused_types
from retain.server.request_model import StrictModel, TextOr

SEPARATOR = "\n\n"  # between turns of the same role, which become one, and beside documents
# Members of results of hosted tools that a model can read, in the order of the prompt.
READABLE_MEMBERS = (
    *("title", "url", "text", "stdout", "stderr", "data", "tool_name", "tool_references", "content", "source"),
)


class CacheControl(StrictModel, other_fields="messages_cache_control"):
    """Breakpoint: the prompt up to this block stays in the prefix cache for some time."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        """How long the prefix is to stay."""
        return 3600.0 if self.ttl == "1h" else 300.0


class CacheableBlock(StrictModel):
    """Base of content blocks: each may be a breakpoint."""

    cache_control: CacheControl | None = None

    def iter_breakpoints(self) -> Iterator[CacheControl]:
        """Yield the breakpoints that the prompt up to this block's end has more than the one before it."""
        content = getattr(self, "content", None)
        for block in content if isinstance(content, list) else ():
            if isinstance(block, CacheableBlock):
                yield from block.iter_breakpoints()
        if self.cache_control:
            yield self.cache_control

    @property
    def prompt_text(self) -> str | None:
        """The block as text of the prompt; None: it is left out."""
        return None


class TextBlock(CacheableBlock, other_fields="messages_cited_block"):
    """Text of a message."""

    type: Literal["text"]
    text: str

    @property
    def prompt_text(self) -> str:
        """Return the text as it is."""
        return self.text


TextContent = TextOr[list[TextBlock]]


class TextSource(StrictModel, other_fields="messages_text_source"):
    """Text of a document, given as one string."""

    type: Literal["text"]
    data: str

    @property
    def prompt_text(self) -> str:
        """The document's text as it stands in the prompt."""
        return self.data


class ContentSource(StrictModel):
    """Text of a document, given as content blocks."""

    type: Literal["content"]
    content: TextContent

    @property
    def prompt_text(self) -> str:
        """The document's text as it stands in the prompt."""
        return join_text(self.content)


class DocumentBlock(CacheableBlock, other_fields="messages_cited_block"):
    """Document of plain text, with a title and context."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @property
    def prompt_text(self) -> str:
        """Return the document's title, context and text, a line break between them."""
        return "\n".join(filter(None, (self.title, self.context, self.source.prompt_text)))


class SearchResultBlock(CacheableBlock, other_fields="messages_cited_block"):
    """Result of a search that the client ran."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]

    @property
    def prompt_text(self) -> str:
        """Return the title, the source and the text of the search result, a line break between them."""
        return "\n".join((self.title, self.source, join_text(self.content)))


class ToolReferenceBlock(CacheableBlock):
    """Name of a tool that a search of tools has found. All tools are in the prompt already."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def prompt_text(self) -> str:
        """Return the name of the tool that was found."""
        return self.tool_name


ResultPart = Annotated[TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, Field(discriminator="type")]


class ToolUseBlock(CacheableBlock, other_fields="messages_tool_use"):
    """Tool call of an assistant message."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(CacheableBlock, other_fields="messages_tool_result"):
    """Result of a tool call, in a user message."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOr[list[ResultPart]] = ""
    is_error: bool = Field(False, description="The content then begins with `Error: ` in the prompt")

    @property
    def prompt_text(self) -> str:
        """Return the text of the tool's result, behind `Error: ` if the tool failed."""
        text = join_text(self.content)
        return f"Error: {text}" if self.is_error else text


class ThinkingBlock(CacheableBlock):
    """Reasoning of an assistant message, passed on to the chat template. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(CacheableBlock):
    """Reasoning that only its author can read. Ignored."""

    type: Literal["redacted_thinking"]
    data: str


class CompactionBlock(CacheableBlock, other_fields="messages_compaction"):
    """Summary of an earlier part of the conversation."""

    type: Literal["compaction"]
    content: str | None = None

    @property
    def prompt_text(self) -> str | None:
        """Return the text of the summary; None: the block has none and is left out."""
        return self.content


class HostedCallBlock(CacheableBlock, extra="ignore"):
    """Call of a tool that another server ran, or a note of that server. Ignored."""

    type: Literal["server_tool_use", "mcp_tool_use", "mcp_tool_listing", "fallback"]


class HostedResultBlock(CacheableBlock, extra="ignore"):
    """Result of a tool that another server ran, as far as it is text."""

    type: Literal[
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "mcp_tool_result",
    ]
    content: Any = None

    @property
    def prompt_text(self) -> str:
        """Return the texts of the hosted tool's result that a model can read, one a line."""
        return "\n".join(_iter_readable(self.content))


def _drop_mapping(schema: dict[str, Any]) -> None:
    """Drop the mapping of types to models: readers of /openapi.json expect one value a model."""
    schema.pop("discriminator", None)


UserBlock = Annotated[
    TextBlock | ToolResultBlock | DocumentBlock | SearchResultBlock | CompactionBlock | HostedResultBlock,
    Field(discriminator="type", json_schema_extra=_drop_mapping),
]
AssistantBlock = Annotated[
    TextBlock
    | ToolUseBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | CompactionBlock
    | HostedCallBlock
    | HostedResultBlock,
    Field(discriminator="type", json_schema_extra=_drop_mapping),
]


def iter_texts(blocks: Sequence[CacheableBlock]) -> Iterator[str]:
    """Yield the texts of blocks in a row, with a separator beside each that is more than text."""
    before: CacheableBlock | None = None
    for block in blocks:
        if text := block.prompt_text:
            if before and not (isinstance(before, TextBlock) and isinstance(block, TextBlock)):
                yield SEPARATOR
            yield text
            before = block


def join_text(content: str | Sequence[CacheableBlock]) -> str:
    """Return text, or the texts of blocks in a row."""
    return content if isinstance(content, str) else "".join(iter_texts(content))


def _iter_readable(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value that a model can read."""
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, list):
        for item in value:
            yield from _iter_readable(item)
    elif isinstance(value, dict) and str(value.get("type")) not in read_refused_types():
        for name in READABLE_MEMBERS:
            yield from _iter_readable(value.get(name))
