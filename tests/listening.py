"""A server of a test, running beside it."""

import threading
from contextlib import contextmanager
from http.server import HTTPServer


@contextmanager
def listening(server: HTTPServer):
    """`server`, answering in a thread until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
