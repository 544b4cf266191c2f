"""A proxy before a SuperLink that replies with HTTP 500 for some time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def proxy(port: int) -> Iterator[tuple[int, threading.Event]]:
    """Forward requests to a port of this machine.

    Yield the port of the proxy, and an event. While the event is set, requests of the program of a run fail,
    except its heartbeats.
    """
    fails = threading.Event()

    class Forward(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if fails.is_set() and "/runtime/" in self.path and "heartbeat" not in self.path:
                return self._reply(500, b"")
            with closing(HTTPConnection("127.0.0.1", port)) as there:
                there.request(self.command, self.path, body, dict(self.headers))
                found = there.getresponse()
                self._reply(found.status, found.read(), found.headers.get("content-type"))

        do_GET = do_POST

        def _reply(self, status: int, body: bytes, kind: str | None = None) -> None:
            self.send_response(status)
            self.send_header("content-type", kind or "text/plain")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Forward) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port, fails
        finally:
            server.shutdown()
