"""The address at which others reach a server on this machine."""

import contextlib
import socket

HOSTS = ("0.0.0.0", "::")  # not an address: all addresses of this machine


def own_address() -> str:
    """This machine's address in the local network; its name if it has none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; a documentation address (RFC 5737)
        return probe.getsockname()[0]
    return socket.gethostname()


def address(host: str, port: int) -> str:
    """The address to give to others, "http://192.168.1.7:8765"; host: the server's own setting."""
    host = own_address() if host in HOSTS else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
