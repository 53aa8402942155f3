"""A store that speaks enough of S3 for tests, on loopback, with faults that a test switches on."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event
from time import time
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

BUCKET = "/bucket/"


@dataclass
class FakeS3:
    """The objects of one bucket, and how its server misbehaves. Times are those of `modified`."""

    objects: dict[str, bytes] = field(default_factory=dict)
    modified: dict[str, float] = field(default_factory=dict)
    status: int | None = None  # answer every request with this
    put_status: int | None = None  # answer every write with this
    hangs: bool = False  # answer nothing until `released`
    drips: bool = False  # send bodies of reads a kilobyte at a time, slower and slower
    cuts: bool = False  # end bodies of reads in the middle
    flips: bool = False  # change a bit of each body of a read
    reads_until_failure: int | None = None  # ranges beyond the first headers; then the server is gone
    list_pages_until_failure: int | None = None  # pages of listings; then each is answered 500
    page_size: int = 1000  # of listings
    requests: list[str] = field(default_factory=list)
    released: Event = field(default_factory=Event)
    url: str = ""

    def put(self, name: str, data: bytes) -> None:
        self.objects[name] = data
        self.modified[name] = time()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    s3: FakeS3

    def log_message(self, *args: object) -> None:
        pass

    def _begin(self) -> bytes | None:
        """Read a body and record the request. None where a fault has answered."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.s3.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}")
        if self.s3.hangs:
            self.s3.released.wait(30)
            self.close_connection = True
            return None
        status = self.s3.status or (self.s3.put_status if self.command == "PUT" else None)
        if status:
            self._answer(status, b"<Error><Code>Fault</Code></Error>")
            return None
        return body

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(BUCKET)

    def do_PUT(self) -> None:
        body = self._begin()
        if body is None:
            return
        if self.headers.get("If-None-Match") == "*" and self._name in self.s3.objects:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self.s3.put(self._name, body)
        self._answer(200, headers={"ETag": '"1"'})

    def do_DELETE(self) -> None:
        if self._begin() is not None:
            self.s3.objects.pop(self._name, None)
            self._answer(204)

    def do_POST(self) -> None:
        """Delete several objects."""
        body = self._begin()
        if body is not None:
            names = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for name in names:
                self.s3.objects.pop(unescape(name), None)
            rows = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            self._answer(200, f"<DeleteResult>{rows}</DeleteResult>".encode())

    def do_HEAD(self) -> None:
        if self._begin() is not None:
            self._send_object()

    def do_GET(self) -> None:
        if self._begin() is None:
            return
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self._send_listing({name: values[0] for name, values in query.items()})
        else:
            self._send_object()

    def _send_listing(self, query: dict[str, str]) -> None:
        s3 = self.s3
        if s3.list_pages_until_failure is not None:
            s3.list_pages_until_failure -= 1
            if s3.list_pages_until_failure < 0:
                self._answer(500, b"<Error><Code>Fault</Code></Error>")
                return
        after = query.get("continuation-token") or query.get("start-after", "")
        names = sorted(name for name in s3.objects if name.startswith(query.get("prefix", "")) and name > after)
        page = names[: s3.page_size]
        rows = "".join(
            f'<Contents><Key>{escape(name)}</Key><Size>{len(s3.objects[name])}</Size><ETag>"1"</ETag><LastModified>'
            f"{datetime.fromtimestamp(s3.modified[name], UTC).isoformat()}</LastModified></Contents>"
            for name in page
        )
        more = "<IsTruncated>false</IsTruncated>"
        if len(page) < len(names):
            token = escape(page[-1])
            more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
        self._answer(200, f"<ListBucketResult>{more}{rows}</ListBucketResult>".encode())

    def _send_object(self) -> None:
        data = self.s3.objects.get(self._name)
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        headers = {"ETag": '"1"', "Last-Modified": formatdate(self.s3.modified[self._name], usegmt=True)}
        begin, end, status = 0, len(data), 200
        if given := self.headers.get("Range"):
            first, _, last = given.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last) + 1, len(data)), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self._send_body(status, data[begin:end], headers, is_header=begin == 0)

    def _send_body(self, status: int, body: bytes, headers: dict[str, str], is_header: bool) -> None:
        s3 = self.s3
        if is_header or self.command == "HEAD":
            self._answer(status, body, headers)
            return
        if s3.reads_until_failure is not None:
            s3.reads_until_failure -= 1
            if s3.reads_until_failure < 0:
                self.close_connection = True
                return
        if s3.flips:
            body = bytes([body[0] ^ 4]) + body[1:]
        if not (s3.cuts or s3.drips):
            self._answer(status, body, headers)
            return
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        self.wfile.write(body[: len(body) // 2])
        for i in range(len(body) // 2, len(body), 1024) if s3.drips else ():
            if s3.released.wait(0.2):
                return
            self.wfile.write(body[i : i + 1024])


@contextmanager
def serve_fake_s3() -> Iterator[FakeS3]:
    """Serve an empty bucket on a free port."""
    s3 = FakeS3()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"s3": s3}))
    server.daemon_threads = True
    s3.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield s3
    finally:
        s3.released.set()
        server.shutdown()
        server.server_close()
