"""Emulates Google Cloud Storage on this machine, as far as gcsfs and TensorStore use it.

Objects are files below a folder, a subfolder for each bucket. Plain GET requests under `/plain/`
read them too, with an index of each folder, as fsspec's `http://` needs it.
"""

import contextlib
import email.parser
import http.server
import json
import os
import pathlib
import threading
import time
import urllib.parse
from collections.abc import Iterator


class ObjectStore:
    """A running store.

    Attributes:
      folder: where the buckets are.
      url: address of the server.
      wait: seconds before each answer.
      left: number of downloads that succeed.
      status: HTTP status of those that do not; 206: half of the bytes.
      served: bytes that were downloaded.
      requests: methods and paths of all requests.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder, self.wait, self.left, self.status, self.served = folder, 0.0, 10**9, 503, 0
        self.requests: list[str] = []
        self.uploads: dict[str, tuple[pathlib.Path, bytearray]] = {}
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which gcsfs and TensorStore find the store."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "FSSPEC_GS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it asks by gRPC
            "GCE_METADATA_ROOT": "127.0.0.1:1",  # nobody looks for credentials on the network
        }


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128  # of connections that begin together


class _Handler(http.server.BaseHTTPRequestHandler):
    store: ObjectStore
    protocol_version, wbufsize = "HTTP/1.1", -1  # an answer is sent whole, not in small packets

    def log_message(self, *_):
        pass

    def _answer(self, status, content=b"", headers=(), length=None):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, str(value))
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):
                self.wfile.write(content)

    def _fail(self, status, message="no"):
        self._answer(status, {"error": {"code": status, "message": message}})

    def _split(self):
        """Returns the parts of the path, each unquoted, and the query."""
        parsed = urllib.parse.urlsplit(self.path)
        query = {name: values[0] for name, values in urllib.parse.parse_qs(parsed.query).items()}
        self.store.requests.append(f"{self.command} {self.path}")
        time.sleep(self.store.wait)
        return [urllib.parse.unquote(part) for part in parsed.path.split("/")[1:]], query

    def _describe(self, bucket, path):
        status = path.stat()
        return {
            "kind": "storage#object",
            "name": path.relative_to(self.store.folder / bucket).as_posix(),
            "bucket": bucket,
            "size": str(status.st_size),
            "generation": str(status.st_mtime_ns),
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
        }

    def _list(self, bucket, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        base = self.store.folder / bucket
        if not base.is_dir():
            return self._fail(404)
        items, prefixes = [], set()
        for path in sorted(base.rglob("*")):
            name = path.relative_to(base).as_posix()
            if not path.is_file() or not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                items.append(self._describe(bucket, path))
        self._answer(200, {"items": items, "prefixes": sorted(prefixes)})

    def _download(self, path):
        size, status, headers = path.stat().st_size, 200, {}
        start, stop = 0, size
        if given := self.headers.get("Range"):
            first, _, last = given.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last or size) + 1, size)
            if start >= size > 0:
                return self._fail(416)
            headers["Content-Range"], status = f"bytes {start}-{stop - 1}/{size}", 206
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        headers |= {"Accept-Ranges": "bytes", "x-goog-generation": path.stat().st_mtime_ns}
        if self.command == "GET":
            self.store.left -= 1
            if self.store.left < 0:
                if self.store.status != 206:
                    return self._fail(self.store.status)
                data = data[: len(data) // 2]
            self.store.served += len(data)
        self._answer(status, data, headers)

    def do_GET(self):
        parts, query = self._split()
        if parts[0] == "plain":
            path = self.store.folder.joinpath(*parts[1:])
            if path.is_dir():
                names = [p.name + "/" * p.is_dir() for p in sorted(path.iterdir())]
                links = "".join(f'<a href="{urllib.parse.quote(n)}">{n}</a>\n' for n in names)
                return self._answer(200, links.encode(), {"Content-Type": "text/html"})
            return self._download(path) if path.is_file() else self._fail(404)
        parts = parts[1:] if parts[0] == "download" else parts
        bucket = parts[3]
        if len(parts) == 4:
            return self._answer(200, {"kind": "storage#bucket", "name": bucket})
        if len(parts) == 5:
            return self._list(bucket, query)
        path = self.store.folder / bucket / "/".join(parts[5:])
        if not path.is_file():
            return self._fail(404)
        if query.get("alt") == "media":
            return self._download(path)
        self._answer(200, self._describe(bucket, path))

    do_HEAD = do_GET

    def do_POST(self):
        parts, query = self._split()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "upload_id" in query:
            path, held = self.store.uploads[query["upload_id"]]
            held += body
            total = int(self.headers["Content-Range"].rpartition("/")[2])
            if len(held) < total:
                return self._answer(308, b"", {"Range": f"bytes=0-{len(held) - 1}"})
            return self._write(parts[4], path, bytes(held), query)
        bucket = parts[4]
        if query["uploadType"] == "resumable":
            path = self.store.folder / bucket / query["name"]
            number = str(len(self.store.uploads))
            self.store.uploads[number] = path, bytearray()
            return self._answer(
                200, b"", {"Location": f"{self.store.url}{self.path}&upload_id={number}"}
            )
        kind = f"Content-Type: {self.headers['Content-Type']}\n\n".encode()
        parsed = email.parser.BytesParser().parsebytes(kind + body)
        start = body.index(b"\n\n", body.index(b"--==0==", 8)) + 2
        name = json.loads(parsed.get_payload()[0].get_payload())["name"]
        path = self.store.folder / bucket / name
        self._write(bucket, path, body[start : body.rindex(b"\n--==0==--")], query)

    do_PUT = do_POST

    def _write(self, bucket, path, content, query):
        if query.get("ifGenerationMatch") == "0" and path.exists():
            return self._fail(412)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self._answer(200, self._describe(bucket, path))

    def do_DELETE(self):
        parts, _ = self._split()
        path = self.store.folder / parts[3] / "/".join(parts[5:])
        if not path.is_file():
            return self._fail(404)
        os.unlink(path)
        self._answer(204)


@contextlib.contextmanager
def run_store(folder: pathlib.Path) -> Iterator[ObjectStore]:
    """Runs a store of a folder's subfolders during the block."""
    store = ObjectStore(folder)
    try:
        yield store
    finally:
        store.close()
