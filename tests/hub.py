"""A server that stands in for the Hugging Face hub, with one model or data set in it, and takes uploads."""

import base64
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_whatever"  # of the one account that there is


class _Hub(BaseHTTPRequestHandler):
    """Serves the folder `server.folder` as owner/name, by the hub's API and file routes.

    server.kind: "models" or "datasets". owner/gated is there too, and gated.
    """

    def do_HEAD(self):
        self.respond(send_body=False)

    def do_GET(self):
        self.respond(send_body=True)

    def do_POST(self):
        body = self.body()
        if self.server.uploads is not None:
            self.send(*self.server.uploads.answer(self.path, self.headers, body), True)
            return
        asked = json.loads(body or b"{}")
        files = self.files()
        entries = [entry(files[path], path) for path in asked.get("paths", []) if path in files]
        self.send(200, {}, json.dumps(entries).encode(), True)

    def do_PUT(self):
        """Where the batch of large files sent it: what it is for is in its name."""
        self.server.uploads.large[self.path.rpartition("/")[2]] = self.body()
        self.send(200, {}, b"", True)

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def files(self):
        return {
            str(path.relative_to(self.server.folder)): path
            for path in sorted(self.server.folder.rglob("*"))
            if path.is_file()
        }

    def respond(self, send_body):
        if self.server.uploads is not None and self.path.startswith("/api/whoami-v2"):
            is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            answer = (200, {}, b'{"name": "user", "type": "user"}') if is_known else (401, {}, b"{}")
            self.send(*answer, send_body)
            return
        kind, files = self.server.kind, self.files()
        path = self.path.split("?")[0].strip("/").split("/")
        is_api = path[0] == "api"
        # Files of a model are asked for without its kind.
        within = ["api", kind] if is_api else [kind] * (kind == "datasets")
        repository, rest = path[len(within) : len(within) + 2], path[len(within) + 2 :]
        if path[: len(within)] != within or repository not in (["owner", "name"], ["owner", "gated"]):
            answer = 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        elif repository == ["owner", "gated"]:
            answer = 401, {"X-Error-Code": "GatedRepo"}, b"{}"
        elif is_api and rest[:1] == ["tree"]:
            answer = self.tree("/".join(rest[2:]), files)
        elif is_api and rest in ([], ["revision", "main"], ["revision", COMMIT]):
            siblings = [{"rfilename": name} for name in files]
            answer = 200, {}, json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode()
        elif is_api:
            answer = 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        elif "/".join(rest[2:]) in files:
            file = files["/".join(rest[2:])]
            self.server.fetched.append(file.name)
            headers = {"ETag": f'"{digest(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            answer = self.ranged(headers, file.read_bytes())
        else:
            answer = 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        self.send(*answer, send_body)

    def tree(self, folder, files):
        """What lies in a folder, and, if that is asked for, in the folders in it."""
        within = f"{folder}/" if folder else ""
        below = {name: file for name, file in files.items() if name.startswith(within)}
        entries = []
        for name, file in below.items():
            if "/" not in name.removeprefix(within) or "recursive=true" in self.path.lower():
                entries.append(entry(file, name))
        folders = {within + name.removeprefix(within).split("/")[0] for name in below}
        entries += [
            {"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders - set(files))
        ]
        if not below:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        return 200, {}, json.dumps(entries).encode()

    def ranged(self, headers, body):
        wanted = self.headers.get("Range")
        if not wanted:
            return 200, headers, body
        first, last = wanted.removeprefix("bytes=").split("-")
        part = body[int(first) : int(last) + 1 if last else None]
        place = f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}"
        return 206, headers | {"Content-Range": place}, part

    def send(self, status, headers, body, send_body):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if send_body:
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def entry(file: Path, name: str) -> dict:
    return {"type": "file", "path": name, "size": file.stat().st_size, "oid": digest(file)}


def digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


class Uploads:
    """What was uploaded: repositories that were made, files by name, and large ones by their SHA-256.

    Files of weights go the way of large ones: their content apart, and a line of the commit that names it.
    """

    def __init__(self):
        self.made: list[dict] = []
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        self.refuses = False  # with 403, everything but the login
        self.address = ""

    def answer(self, path, headers, body):
        """The answer to a POST: (status, headers, body)."""
        path = path.split("?")[0]
        if self.refuses or headers.get("Authorization") != f"Bearer {TOKEN}":
            return 403, {}, b'{"error": "you may not write here"}'
        if path == "/api/repos/create":
            self.made.append(json.loads(body))
            answer = {"url": f"{self.address}/user/name", "name": "user/name"}
        elif path == "/api/models/user/name/preupload/main":
            asked = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith((".safetensors", ".gguf")) else "regular" for name in asked}
            plans = [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]
            answer = {"files": plans}
        elif path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        elif path == "/user/name.git/info/lfs/objects/batch":
            objects = [self._action(each) for each in json.loads(body)["objects"]]
            answer = {"transfer": "basic", "objects": objects}
        elif path == "/api/models/user/name/commit/main":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.large[value["oid"]]
            url = f"{self.address}/user/name/commit/{COMMIT}"
            answer = {"success": True, "commitOid": COMMIT, "commitUrl": url}
        else:
            return 404, {"X-Error-Message": f"there is no {path} here"}, b"{}"
        return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()

    def _action(self, wanted):
        place = {"href": f"{self.address}/large/{wanted['oid']}"}
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": place}}


@contextlib.contextmanager
def stand_in(folder: Path, kind: str, uploads: Uploads | None = None):
    """Yields (address, names of the files that were asked for). uploads: takes what is uploaded, as user."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.folder, server.kind, server.fetched, server.uploads = folder, kind, [], uploads
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    if uploads is not None:
        uploads.address = address
    try:
        yield address, server.fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
