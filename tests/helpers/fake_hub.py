"""A server that speaks the part of the Hugging Face hub's API by which repositories are listed and downloaded."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEWER = "fedcba9876543210fedcba9876543210fedcba98"
LARGE = (".safetensors", ".parquet")  # files that the hub keeps apart, with their SHA-256


@dataclass
class Repository:
    """What the hub holds under one name."""

    files: Mapping[str, bytes]
    gated: bool = False
    commits: tuple[str, ...] = (COMMIT,)  # the last one is the newest


@dataclass
class Hub:
    """A hub, with what it was asked for and the faults that it has."""

    url: str
    repositories: dict[str, Repository]  # models/owner/name or datasets/owner/name
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    breaks: dict[str, int] = field(default_factory=dict)  # file -> bytes after which the connection ends, once
    damaged: set[str] = field(default_factory=set)  # files of which another content is sent

    def downloads(self) -> list[tuple[str, str]]:
        """Returns (file, Range) of every download."""
        return [(path.rsplit("/", 1)[1], part) for method, path, part in self.asked if "/resolve/" in path]


@contextmanager
def hub(**repositories: Repository) -> Iterator[Hub]:
    """Serves repositories, named `models__owner__name`, at a free port of this host."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    named = {name.replace("__", "/"): repository for name, repository in repositories.items()}
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}", named)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        fake: Hub = self.server.hub  # type: ignore[attr-defined]
        path = urlsplit(self.path).path
        fake.asked.append((self.command, path, self.headers.get("Range", "")))
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            self._tell(fake, "/".join(parts[1:4]), parts[4:])
            return
        at = parts.index("resolve")
        name = "/".join(parts[:at]) if parts[0] == "datasets" else "models/" + "/".join(parts[:at])
        self._send_file(fake, fake.repositories[name], parts[at + 1], "/".join(parts[at + 2 :]))

    do_HEAD = do_GET

    def _tell(self, fake: Hub, name: str, rest: list[str]) -> None:
        repository = fake.repositories.get(name)
        if repository is None:
            self._refuse(404, "RepoNotFound")
            return
        if repository.gated:
            self._refuse(403, "GatedRepo")
            return
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.commits[-1] if revision == "main" else revision
        if commit not in repository.commits:
            self._refuse(404, "RevisionNotFound")
            return
        listed = [_listed(file, content) for file, content in repository.files.items()]
        if rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": file["rfilename"], "size": file["size"], "oid": file["blobId"],
                     **({"lfs": {"oid": file["lfs"]["sha256"], "size": file["size"], "pointerSize": 130}}
                        if "lfs" in file else {})} for file in listed]  # fmt: skip
            self._send_json(tree)
            return
        owner_name = name.split("/", 1)[1]
        self._send_json({"_id": "1", "id": owner_name, "modelId": owner_name, "sha": commit, "private": False,
                         "disabled": False, "gated": False, "downloads": 0, "likes": 0, "tags": [],
                         "siblings": listed})  # fmt: skip

    def _send_file(self, fake: Hub, repository: Repository, commit: str, file: str) -> None:
        content = repository.files[file]
        first = int(self.headers.get("Range", "bytes=0-")[len("bytes=") :].split("-")[0])
        sent = bytes(reversed(content)) if file in fake.damaged else content
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content) - first))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        end = fake.breaks.pop(file, None)
        self.wfile.write(sent[first:end])
        self.close_connection = end is not None

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


def _listed(file: str, content: bytes) -> dict[str, Any]:
    """Returns how the hub lists a file: a large one by its SHA-256, any by git's SHA-1."""
    sha1 = hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()
    large = {"lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}}
    return {"rfilename": file, "size": len(content), "blobId": sha1, **(large if file.endswith(LARGE) else {})}
