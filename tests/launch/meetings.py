"""Meetings at a free port of this machine."""

import socket

from meshtrain.launch.cluster import Meeting


def meetings(count):
    """Returns the meeting of each of so many processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [Meeting(f"127.0.0.1:{port}", count, index) for index in range(count)]
