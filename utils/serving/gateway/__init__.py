"""The gateway in front of Triton, through which all clients go.

    with TritonServer("triton_model_repo") as server, Gateway(server, port=8000) as gateway:
        gateway.http                                # "127.0.0.1:8000"

refusal (errors as HTTP responses) -> triton (calls the server) -> stubs (watches its processes)
-> checks (of request bodies) -> openai_api -> app (routes, keys, limits) -> process (starts it)
"""

from utils.serving.gateway.process import Gateway

__all__ = ["Gateway"]
