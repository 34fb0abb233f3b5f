"""As much of the Google Cloud Storage JSON API as reading and writing objects needs.

A program of its own: the store's library may hold the interpreter lock while it waits for an answer, so a server
in the same process could never give one. Prints its port.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

OBJECTS: dict[tuple[str, str], tuple[bytes, int]] = {}
UPLOADS: dict[str, tuple[str, str, bytearray]] = {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body go in two writes

    def log_message(self, *args: object) -> None:
        pass

    def handle_any(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        body = self._read_body()
        route = re.fullmatch(r"(/upload)?/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", parts.path)
        if route is None:
            self._answer(404, {})
            return
        bucket, name = route[2], unquote(route[3] or "")
        if route[1]:
            self._upload(bucket, query, body)
        elif self.command == "GET" and name:
            self._read(bucket, name, query)
        elif self.command == "GET" and parts.path.endswith("/o"):
            items = [
                self._describe(*key)
                for key in sorted(OBJECTS)
                if key[0] == bucket and key[1].startswith(query.get("prefix", ""))
            ]
            self._answer(200, {"kind": "storage#objects", "items": items})
        elif self.command == "DELETE" and OBJECTS.pop((bucket, name), None):
            self._answer(204, None)
        else:
            self._answer(404, {"error": {"code": 404, "message": "not found"}})

    do_GET = do_POST = do_PUT = do_DELETE = handle_any

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _describe(self, bucket: str, name: str) -> dict[str, str]:
        data, generation = OBJECTS[bucket, name]
        moment = "2026-01-01T00:00:00Z"
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "generation": str(generation),
            "metageneration": "1",
            "size": str(len(data)),
            "etag": f"E{generation}",
            "updated": moment,
            "timeCreated": moment,
        }

    def _read(self, bucket: str, name: str, query: dict[str, str]) -> None:
        if (bucket, name) not in OBJECTS:
            self._answer(404, {"error": {"code": 404, "message": "No such object"}})
            return
        if query.get("alt") != "media":
            self._answer(200, self._describe(bucket, name))
            return
        data, generation = OBJECTS[bucket, name]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        end = min(int(wanted[2]), len(data) - 1) if wanted and wanted[2] else len(data) - 1
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        self.send_header("x-goog-generation", str(generation))
        self.send_header("Content-Length", str(end + 1 - start))
        self.end_headers()
        self.wfile.write(data[start : end + 1])

    def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        if self.command == "POST":
            name = query.get("name") or json.loads(body)["name"]
            token = f"u{len(UPLOADS)}"
            UPLOADS[token] = (bucket, name, bytearray())
            place = f"http://{self.headers['Host']}/upload/storage/v1/b/{bucket}/o?upload_id={token}"
            self._answer(200, {}, {"Location": place})
            return
        bucket, name, data = UPLOADS[query["upload_id"]]
        data += body
        if self.headers.get("Content-Range", "").endswith("/*"):
            self._answer(308, None, {"Range": f"bytes=0-{len(data) - 1}"} if data else {})
            return
        OBJECTS[bucket, name] = (bytes(data), OBJECTS.get((bucket, name), (b"", 0))[1] + 1)
        self._answer(200, self._describe(bucket, name))

    def _answer(self, status: int, record: object, headers: dict[str, str] | None = None) -> None:
        body = b"" if record is None else json.dumps(record).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    sys.stdin.close()
    server.serve_forever()
