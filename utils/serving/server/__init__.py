"""A Triton Inference Server on this machine, as a context manager or a command.

with TritonServer("triton_model_repo") as server: …            # triton_server.py
python -m utils.serving.server --repo triton_model_repo        # with the gateway, until Ctrl-C
"""

from utils.serving.install import ServerError, container_command, server_available
from utils.serving.server.triton_server import TritonServer

__all__ = ["ServerError", "TritonServer", "container_command", "server_available"]
