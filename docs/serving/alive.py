"""The liveness probe of docs/serving/kubernetes.yaml: does the server still generate tokens?

    python3 alive.py [URL] [SECONDS] [METRICS]    exit status 0: alive, 1: restart the container

`/v2/health/live` is not enough: a server whose ranks hang still answers it. A server with requests
is alive while its counters grow, however long its queue: a restart would lose all waiting requests.
If there is no progress in half of the time, the other half is left to generate one token, through
tokenizer, queue and ranks.
"""

import json
import re
import sys
import time
import urllib.request


def look(metrics):
    """(work done, requests in the server) from its metrics; zeros if it does not answer."""
    try:
        with urllib.request.urlopen(metrics, timeout=2) as answer:
            text = answer.read().decode()
    except OSError:
        return 0.0, 0.0

    def total(names):
        return sum(map(float, re.findall(rf"^kintsugi_(?:{names}){{.*}} (\S+)$", text, re.M)))

    return total("steps_total|tokens_total"), total("requests_running|queue_waiting")


def progresses(metrics, seconds):
    """Whether the server has requests and makes progress on them within `seconds`."""
    until, (before, here) = time.monotonic() + seconds, look(metrics)
    while here and time.monotonic() < until:
        time.sleep(0.2)
        done, here = look(metrics)
        if done > before:
            return True
    return False


def answers(url, seconds):
    """Whether the server generates one token within `seconds`."""
    body = json.dumps({"text_input": "a", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"{url}/v2/models/gpt/generate", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return "text_output" in json.load(answer)
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    half = float(sys.argv[2] if len(sys.argv) > 2 else 20) / 2
    metrics = sys.argv[3] if len(sys.argv) > 3 else "http://127.0.0.1:8002/metrics"
    sys.exit(0 if progresses(metrics, half) or answers(url, half) else 1)
