"""A real S3 protocol server on loopback in a process of its own, and a proxy before it that throttles, fails and cuts connections."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_SERVE = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
sys.stdout.write("%s:%d\\n" % server.get_host_and_port())
sys.stdout.flush()
sys.stdin.read()
server.stop()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """host:port of a server that ends with the block."""
    command = [sys.executable, "-c", _SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


class Flaky:
    """What the proxy does to a request: called with method and path; an answer status, "cut" (after half of the body), or None."""

    def __init__(self) -> None:
        self.rule: Callable[[str, str], int | str | None] = lambda method, path: None
        self.seen: list[tuple[str, str]] = []


@contextmanager
def proxy(backend: str) -> Iterator[tuple[str, Flaky]]:
    """A proxy to ``backend``, and its faults."""
    flaky = Flaky()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            flaky.seen.append((self.command, self.path))
            length = int(self.headers.get("Content-Length") or 0)
            verdict = flaky.rule(self.command, self.path)
            if verdict == "cut":
                self.rfile.read(length // 2)
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            body = self.rfile.read(length)
            if isinstance(verdict, int):
                self.send_response(verdict)
                text = b"<Error><Code>SlowDown</Code><Message>planned</Message></Error>"
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
                return
            upstream = http.client.HTTPConnection(backend, timeout=30)
            upstream.request(
                self.command,
                self.path,
                body,
                {k: v for k, v in self.headers.items() if k.lower() != "host"} | {"Host": self.headers["Host"]},
            )
            answer = upstream.getresponse()
            data = answer.read()
            if verdict == "lose":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                    self.send_header(key, value)
            self.send_header("Content-Length", answer.getheader("Content-Length") or str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if verdict == "half" else data)
            if verdict == "half":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            upstream.close()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", flaky
    finally:
        server.shutdown()
        server.server_close()


def make_bucket(backend: str, name: str) -> None:
    """Create a bucket."""
    connection = http.client.HTTPConnection(backend, timeout=10)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


def uploads(backend: str, bucket: str) -> int:
    """Multipart uploads that were neither completed nor aborted."""
    connection = http.client.HTTPConnection(backend, timeout=10)
    connection.request("GET", f"/{bucket}?uploads")
    text = connection.getresponse().read().decode()
    connection.close()
    return text.count("<UploadId>")
