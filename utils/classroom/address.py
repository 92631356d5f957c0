"""By which address others reach what listens on this machine."""

import contextlib
import socket

HOSTS = ("0.0.0.0", "::")  # not the address of anything, but of all that this machine has


def own_address() -> str:
    """The address by which the local network knows this machine; its name where there is none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; RFC 5737's address of nobody
        return probe.getsockname()[0]
    return socket.gethostname()


def address(host: str, port: int) -> str:
    """The address to tell others, "http://192.168.1.7:8765"; host: what is listened on."""
    host = own_address() if host in HOSTS else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
