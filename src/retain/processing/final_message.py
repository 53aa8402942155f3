"""Prompts that end inside of their last message, so that the answer continues it.

As `apply_chat_template(continue_final_message=True)` of transformers: a marker behind the message's text shows where
the template puts its end.
"""

from __future__ import annotations

from collections.abc import Callable

from retain.processing.chat_template import Messages

MARKER = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own; the blank shows whether the template trims messages


def render_unfinished(render: Callable[[Messages], str], messages: Messages) -> str:
    """Return messages as prompt text up to the end of the last one's content.

    `render` renders messages without the beginning of an answer. Where the template trims messages, the end is trimmed
    too. Raises ValueError if the template does not show the last message as it is.
    """
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise ValueError("the last message has no text to continue")
    text = render([*messages[:-1], {**messages[-1], "content": content + MARKER}])
    begun, marker, _ = text.rpartition(MARKER.strip())
    if not marker or content.strip() not in text:
        raise ValueError("the model's chat template does not show the last message as it is: it cannot be continued")
    return begun if text.startswith(MARKER, len(begun)) else begun.rstrip()
