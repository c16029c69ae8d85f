"""A Hub on this machine: what huggingface_hub's client needs of it to create, fill and read model repositories.

The server runs in a thread of the process that enters it; huggingface_hub reads its environment when it is imported,
so that clients run in processes of their own, with the variables of `LoopbackHub.environment`.
"""

import base64
import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

WRITER, READER = "hf_writer", "hf_reader"
"""Tokens of the one user: with all rights, and without that to write."""
_ROLES = {WRITER: "write", READER: "read"}
_USER = "user"
_LARGE = (".safetensors", ".bin")
_REPOSITORY = r"(?P<id>[\w.-]+/[\w.-]+)"


class LoopbackHub:
    """Repositories in memory, behind a server; a context manager.

    Attributes:
        repositories: By id, of each its branches: by name a list of commits, each a mapping from path to content.
        requests: What was asked: method, path, token.
    """

    def __init__(self):
        self.repositories: dict[str, dict[str, list[dict[str, bytes]]]] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.private: set[str] = set()
        self.failing: dict[str, str] = {}
        """By id, what becomes of large files but the first: ``"error"`` (500), ``"drop"`` (the line goes dead)."""
        self.objects: dict[tuple[str, str], bytes] = {}
        self.first: dict[str, str] = {}
        self.cards: list[dict] = []
        """Metadata of every model card that was handed in for a check."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))

    def __enter__(self) -> "LoopbackHub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, home: Path, *, token: str | None = WRITER) -> dict[str, str]:
        """The variables of a client with a home of its own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE"))}
        own = {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        return kept | own | ({} if token is None else {"HF_TOKEN": token}) | {"HF_HUB_DISABLE_TELEMETRY": "1"}

    def files(self, repository: str, branch: str = "main") -> dict[str, bytes]:
        """What lies on a branch; nothing where there is no commit yet."""
        commits = self.repositories[repository].get(branch, [])
        return commits[-1] if commits else {}


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body that waits for the head to be acknowledged costs 40 ms

    def log_message(self, *arguments):
        """Keep quiet."""

    def answer(self):
        path = unquote(urlsplit(self.path).path)
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        self.token = token if scheme == "Bearer" else None
        self.hub.requests.append((self.command, path, self.token))
        for method, pattern, respond, writes in _ROUTES:
            if self.command in method.split("/") and (match := re.fullmatch(pattern, path)):
                groups = match.groupdict()
                if writes and _ROLES.get(self.token) != "write":
                    self.body()
                    return self.reply({"error": "You need a token that may write."}, 403 if self.token else 401)
                return respond(self, **groups)
        self.body()
        return self.reply({"error": f"no such endpoint: {path}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def reply(self, content, status: int = 200, **headers: str):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def visible(self, id: str) -> bool:
        """Whether there is such a repository for who asks; otherwise say that there is none, as the Hub does."""
        if id in self.hub.repositories and (id not in self.hub.private or self.token in _ROLES):
            return True
        self.reply(
            {"error": "Repository not found"}, 404 if self.token in _ROLES else 401, X_Error_Code="RepoNotFound"
        )
        return False

    def commits(self, id: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Name and files of a revision: a branch, or a commit by its name."""
        branches = self.hub.repositories[id]
        if revision in branches:
            return _sha(id, revision, len(branches[revision])), self.hub.files(id, revision)
        for branch, commits in branches.items():
            for number, files in enumerate(commits, 1):
                if _sha(id, branch, number) == revision:
                    return revision, files
        self.reply({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
        return None

    def who_am_i(self):
        if self.token not in _ROLES:
            return self.reply({"error": "Invalid username or password."}, 401)
        access = {"displayName": "test", "role": _ROLES[self.token]}
        return self.reply({"type": "user", "name": _USER, "orgs": [], "auth": {"accessToken": access}})

    def create(self):
        asked = json.loads(self.body())
        owner = asked.get("organization") or _USER
        id = f"{owner}/{asked['name']}"
        if owner != _USER:
            return self.reply({"error": f"You don't have the rights to create a model under {owner!r}"}, 403)
        there = id in self.hub.repositories
        self.hub.repositories.setdefault(id, {"main": []})
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(id)
        return self.reply({"url": f"{self.hub.url}/{id}", "name": id}, 409 if there else 200)

    def information(self, id: str, revision: str = "main"):
        if self.visible(id) and (found := self.commits(id, revision)):
            siblings = [{"rfilename": path} for path in found[1]]
            known = {"id": id, "sha": found[0], "private": id in self.hub.private, "tags": [], "siblings": siblings}
            if "config.json" in found[1]:
                config = json.loads(found[1]["config.json"])
                shown = ("architectures", "auto_map", "model_type")
                known["config"] = {name: config[name] for name in shown if name in config}
            self.reply(known)

    def tree(self, id: str, revision: str):
        if self.visible(id) and (found := self.commits(id, revision)):
            files = [{"type": "file", "path": path, "size": len(data), "oid": "0"} for path, data in found[1].items()]
            self.reply(files)

    def resolve(self, id: str, revision: str, path: str):
        if not self.visible(id) or (found := self.commits(id, revision)) is None:
            return
        sha, files = found
        if path not in files:
            return self.reply({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        etag = hashlib.sha256(files[path]).hexdigest()
        self.reply(files[path], ETag=f'"{etag}"', X_Repo_Commit=sha)

    def branch(self, id: str, branch: str):
        self.body()
        branches = self.hub.repositories[id]
        there = branch in branches
        branches.setdefault(branch, list(branches["main"]))
        self.reply({}, 409 if there else 201)

    def check_card(self):
        front = re.match(r"---\n(.*?)\n---", json.loads(self.body())["content"], re.DOTALL)
        try:
            metadata = yaml.safe_load(front[1]) if front else {}
            self.hub.cards.append(metadata)
            problems = [] if isinstance(metadata, dict) else ["no mapping"]
        except yaml.YAMLError as error:
            problems = [str(error)]
        errors = [{"message": problem} for problem in problems]
        self.reply({"errors": errors, "warnings": []}, 400 if errors else 200)

    def preupload(self, id: str, revision: str):
        asked = json.loads(self.body())["files"]
        if self.visible(id):
            modes = {file["path"]: "lfs" if file["path"].endswith(_LARGE) else "regular" for file in asked}
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            self.reply({"files": files})

    def batch(self, id: str):
        objects = []
        for wanted in json.loads(self.body())["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{id}/{wanted['oid']}"}}
            there = (id, wanted["oid"]) in self.hub.objects
            objects.append({**wanted} if there else {**wanted, "actions": upload})
        self.reply({"transfer": "basic", "objects": objects})

    def store(self, id: str, oid: str):
        is_first = self.hub.first.setdefault(id, oid) == oid  # they may arrive at once
        failure = None if is_first else self.hub.failing.get(id)
        if failure == "drop":
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self.close_connection = True
            return
        data = self.body()
        if failure == "error":
            return self.reply({"error": "Internal Server Error"}, 500)
        whole = hashlib.sha256(data).hexdigest() == oid
        if whole:
            self.hub.objects[id, oid] = data
        self.reply({}, 200 if whole else 422)

    def commit(self, id: str, revision: str):
        lines = [json.loads(line) for line in self.body().splitlines() if line]
        if not self.visible(id):
            return
        branches = self.hub.repositories[id]
        files = dict(self.hub.files(id, revision))
        for entry in lines:
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[id, value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        branches[revision].append(files)
        sha = _sha(id, revision, len(branches[revision]))
        self.reply({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{id}/commit/{sha}"})


def _sha(id: str, branch: str, number: int) -> str:
    return hashlib.sha1(f"{id} {branch} {number}".encode()).hexdigest()


# method · path · what answers · whether it needs the right to write
_ROUTES = (
    ("GET", "/api/whoami-v2", _Handler.who_am_i, False),
    ("POST", "/api/repos/create", _Handler.create, True),
    ("POST", "/api/validate-yaml", _Handler.check_card, False),
    ("GET", f"/api/models/{_REPOSITORY}", _Handler.information, False),
    ("GET", f"/api/models/{_REPOSITORY}/revision/(?P<revision>.+)", _Handler.information, False),
    ("GET", f"/api/models/{_REPOSITORY}/tree/(?P<revision>[^/]+)", _Handler.tree, False),
    ("POST", f"/api/models/{_REPOSITORY}/branch/(?P<branch>.+)", _Handler.branch, True),
    ("POST", f"/api/models/{_REPOSITORY}/preupload/(?P<revision>.+)", _Handler.preupload, True),
    ("POST", f"/api/models/{_REPOSITORY}/commit/(?P<revision>.+)", _Handler.commit, True),
    ("POST", rf"/{_REPOSITORY}\.git/info/lfs/objects/batch", _Handler.batch, True),
    ("PUT", f"/lfs/{_REPOSITORY}/(?P<oid>[0-9a-f]+)", _Handler.store, False),
    ("GET/HEAD", f"/{_REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve, False),
)
