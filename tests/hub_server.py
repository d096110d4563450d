"""A small Hugging Face Hub on 127.0.0.1 for tests: real HTTP, with the faults of a bad day on request.

It answers what huggingface_hub asks for: repository information, HEAD and GET of files with ranges and ETags, large
files behind a redirect to a storage address, as on the Hub.
"""

import hashlib
import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Files from this size on are "LFS": their ETag is a SHA-256 and they come from the storage address.
LARGE_BYTES = 1000


@dataclass
class FakeHub:
    """What the server holds and how it misbehaves. Change it between requests."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    forbidden: set[str] = field(default_factory=set)
    # File name to how many more times its body is cut off half way.
    cuts: Counter = field(default_factory=Counter)
    # Path prefix to how many more times it is answered with 429, and the Retry-After it gives.
    busy: Counter = field(default_factory=Counter)
    retry_after: str | None = "0"
    # File name to how many more times a byte of it is changed on the way.
    corruptions: Counter = field(default_factory=Counter)
    ignores_ranges: bool = False
    # What was asked, and the body bytes sent for each file.
    log: list[str] = field(default_factory=list)
    sent: Counter = field(default_factory=Counter)
    endpoint: str = ""


def etag(content: bytes) -> str:
    if len(content) >= LARGE_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve(hub: FakeHub):
    """Serves `hub` until the block ends; its address is `hub.endpoint`."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool):
        path = unquote(urlparse(self.path).path)
        self.hub.log.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        for prefix, left in self.hub.busy.items():
            if left > 0 and path.startswith(prefix):
                self.hub.busy[prefix] -= 1
                retry = {"Retry-After": self.hub.retry_after} if self.hub.retry_after is not None else {}
                return self._send(429, b"slow down", retry, with_body)
        if path.startswith("/storage/"):
            owner, repository, name = path.removeprefix("/storage/").split("/", 2)
            return self._file(name, with_body, self.hub.files[f"{owner}/{repository}"][name])
        if path.startswith("/api/"):
            return self._information(path, with_body)
        repository, _, rest = path.strip("/").partition("/resolve/")
        repository = repository.removeprefix("datasets/")
        revision, _, name = rest.partition("/")
        content = self.hub.files.get(repository, {}).get(name)
        if refusal := self._refusal(repository, revision):
            return self._send(*refusal, with_body)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        if len(content) < LARGE_BYTES:
            return self._file(name, with_body, content)
        headers = {
            "X-Repo-Commit": COMMIT,
            "X-Linked-Etag": f'"{etag(content)}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"{self.hub.endpoint}/storage/{repository}/{name}",
        }
        return self._send(302, b"", headers, with_body)

    def _refusal(self, repository: str, revision: str):
        if repository in self.hub.gated:
            return 403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
        if repository in self.hub.forbidden:
            return 403, b"", {"X-Error-Message": "not yours"}
        if repository not in self.hub.files:
            return 401, b"", {"X-Error-Code": "RepoNotFound"}
        if revision not in ("main", "v1", COMMIT):
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        return None

    def _information(self, path: str, with_body: bool):
        name, _, revision = path.removeprefix("/api/models/").removeprefix("/api/datasets/").partition("/revision/")
        # The real Hub lets anybody list a gated repository; it refuses the files.
        refusal = None if name in self.hub.gated else self._refusal(name, revision or "main")
        if refusal:
            return self._send(*refusal, with_body)
        siblings = [{"rfilename": file} for file in self.hub.files[name]]
        content = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        return self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"}, with_body)

    def _file(self, name: str, with_body: bool, content: bytes):
        headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if not with_body:
            self._send(200, content, headers, with_body)
            return
        status, start = 200, 0
        wanted = self.headers.get("Range")
        if wanted and not self.hub.ignores_ranges:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            if start >= len(content):
                self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"}, with_body)
                return
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.hub.corruptions[name] > 0:
            self.hub.corruptions[name] -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        body = content[start:]
        if self.hub.cuts[name] > 0:
            self.hub.cuts[name] -= 1
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            half = body[: len(body) // 2]
            self.wfile.write(half)
            self.wfile.flush()
            self.hub.sent[name] += len(half)
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.hub.sent[name] += len(body)
        self._send(status, body, headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)
