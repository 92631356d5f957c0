"""The preStop hook of docs/serving/kubernetes.yaml: refuses new requests and lets running ones end.

    python3 leave.py [URL] [PAUSE] [SECONDS]

A terminating pod still gets requests until every node has been notified; hence the pause, during
which it keeps serving. Then `gpt` is unloaded: Triton refuses new requests for it and lets running
ones end, over HTTP and gRPC. SIGTERM alone would cut off some gRPC requests.
"""

import json
import os
import sys
import time
import urllib.request


def post(url, body):
    key = os.environ.get("TRITON_KEY")  # if model control requires one
    headers = {"kintsugi-control": key} if key else {}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read() or "[]")


def served(url):
    """Whether a version of gpt is loaded, even if only for its last requests."""
    models = post(f"{url}/v2/repository/index", {})
    states = [model.get("state") for model in models if model["name"] == "gpt"]
    return any(state in ("READY", "UNLOADING") for state in states)


def leave(url, pause, seconds):
    """Unloads gpt after the pause; returns when it is gone, or after `seconds`."""
    time.sleep(pause)
    until = time.monotonic() + seconds
    post(f"{url}/v2/repository/models/gpt/unload", {})
    while served(url) and time.monotonic() < until:
        time.sleep(0.1)


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    pause = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 60.0
    leave(url, pause, seconds)
