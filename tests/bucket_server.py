"""A bucket server, in memory, on a free port of 127.0.0.1, which it prints: `python -m tests.bucket_server`.

It is gcp-storage-emulator with what its clients need and what goes wrong in a cloud:

- A download has the header X-Goog-Generation, without which TensorStore says "Malformed StorageGeneration".
- `ifGenerationMatch` of an upload is compared, so that of two writers that both create an object one is refused.
- `moveTo` moves an object, as the newer versions of the store do.
- The bucket `readonly` refuses writes (403) and `private` everything (401).
- After SIGUSR1 each connection is closed without an answer, as by a network that is gone, until SIGUSR2.
"""

import contextlib
import functools
import http.server
import json
import signal
from http import HTTPStatus

from gcp_storage_emulator.handlers import buckets, objects

_download, _insert = objects.download, objects.insert


def download(request, response, storage, *rest):
    _download(request, response, storage, *rest)
    with contextlib.suppress(Exception):  # it has answered 404
        found = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
        response["X-Goog-Generation"] = str(found["generation"])


def insert(request, response, storage, *rest):
    if "ifGenerationMatch" in request.query:
        name = request.query["name"][0] if "name" in request.query else request.data["meta"]["name"]
        there = storage.objects.get(request.params["bucket_name"], {})
        if request.query["ifGenerationMatch"][0] != (there[name]["generation"] if name in there else "0"):
            response.status = HTTPStatus.PRECONDITION_FAILED
            return
    _insert(request, response, storage, *rest)


objects.download, objects.insert = download, insert  # before the routes of the server are made

from gcp_storage_emulator import server  # noqa: E402
from gcp_storage_emulator.storage import Storage  # noqa: E402


def move(request, response, storage):
    request.params["dest_bucket_name"] = bucket = request.params["bucket_name"]
    objects.copy(request, response, storage)
    if response.status == HTTPStatus.OK:
        storage.delete_file(bucket, request.params["object_id"])


MOVE = r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.+)/moveTo/o/(?P<dest_object_id>.+)$"
server.HANDLERS = ((MOVE, {"POST": move}), *server.HANDLERS)


class Handler(server.RequestHandler):
    is_gone = False

    def parse_request(self):
        if not super().parse_request() or Handler.is_gone:
            return False
        refused = HTTPStatus.UNAUTHORIZED if "/b/private" in self.path else None
        if "/b/readonly" in self.path and self.command != "GET":
            refused = HTTPStatus.FORBIDDEN
        if refused is None:
            return True
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        text = json.dumps({"error": {"code": refused, "message": "the caller has no access to the bucket"}})
        self.send_response(refused)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
        return False


def main():
    storage = Storage(use_memory_fs=True)
    for name in ("runs", "readonly", "private"):
        buckets.create_bucket(name, storage)
    for number, is_gone in ((signal.SIGUSR1, True), (signal.SIGUSR2, False)):
        signal.signal(number, lambda *_, gone=is_gone: setattr(Handler, "is_gone", gone))
    serving = http.server.HTTPServer(("127.0.0.1", 0), functools.partial(Handler, storage))
    print(serving.server_address[1], flush=True)
    serving.serve_forever()


if __name__ == "__main__":
    main()
