"""The gateway: what stands in front of Triton, and the only one whom clients of HTTP talk to.

    with TritonServer("triton_model_repo") as server, Gateway(server, port=8000) as gateway:
        gateway.http                                # "127.0.0.1:8000"

refusal (an error as HTTP) -> triton (asks the server) -> stubs (watches its processes)
-> checks (what a body may hold) -> openai_api -> app (routes, keys, limits) -> process (starts it)
"""

from utils.serving.gateway.process import Gateway

__all__ = ["Gateway"]
