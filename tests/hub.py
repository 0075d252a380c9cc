"""A server that stands in for the Hugging Face hub, with one model or data set in it."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    """Serves the folder `server.folder` as owner/name, by the hub's API and file routes.

    server.kind: "models" or "datasets". owner/gated is there too, and gated.
    """

    def do_HEAD(self):
        self.respond(send_body=False)

    def do_GET(self):
        self.respond(send_body=True)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        files = self.files()
        entries = [entry(files[path], path) for path in asked.get("paths", []) if path in files]
        self.send(200, {}, json.dumps(entries).encode(), True)

    def files(self):
        return {
            str(path.relative_to(self.server.folder)): path
            for path in sorted(self.server.folder.rglob("*"))
            if path.is_file()
        }

    def respond(self, send_body):
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


@contextlib.contextmanager
def stand_in(folder: Path, kind: str):
    """Yields (address, names of the files that were asked for)."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.folder, server.kind, server.fetched = folder, kind, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
