"""Images: refused, or a part of what is cached: another image behind the same words has its own answer."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import replace

from cachecheck.comparison import compare
from cachecheck.endpoint import Endpoint
from cachecheck.http_client import RefusedError
from cachecheck.probe import Probe

NUM_TEXTS = 3
NUM_WORDS = 60
COLOURS = ((220, 20, 20), (20, 20, 220))
SIDE = 64  # pixels


def run(probe: Probe) -> None:
    """A chat with an image is refused; or it has the answer of its own image, after one with another image."""
    probe.skip_unless(Endpoint.CHAT in probe.capabilities.endpoints, "the server answers no chats")
    for i in range(NUM_TEXTS):
        plain = replace(probe.texts.prompt(NUM_WORDS + 5 * i), endpoint=Endpoint.CHAT)
        one, other = (replace(plain, image=draw_image(colour)) for colour in COLOURS)
        try:
            first = probe.ask(one)
        except ValueError as error:  # of any status: llama.cpp's server has 500 for it
            if not isinstance(error, RefusedError) and "image" not in str(error).partition(": ")[2]:
                raise
            probe.judge(True, "images are refused", "")
            return
        second = probe.ask(other)
        without = probe.ask(plain)
        if all(compare(first, answer, 0) is None for answer in (second, without)):
            probe.unsure(f"text {i}, its image", "the answers with two images and without one are equal")
            continue
        probe.equal_cold(other, second, f"text {i}, after the same words with another image")
        probe.equal_cold(plain, without, f"text {i}, without an image after it")
        probe.equal(first, probe.ask(one), f"text {i}, its first image again")


def draw_image(colour: tuple[int, int, int]) -> str:
    """Return a square of one colour as a data URL of a PNG."""
    rows = (b"\0" + bytes(colour) * SIDE) * SIDE
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    data = b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()
