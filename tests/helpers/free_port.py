"""A port of this machine for processes that are to find each other."""

import socket


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
