"""The liveness probe of docs/serving/kubernetes.yaml: does the server still make a token?

    python3 alive.py [URL] [SECONDS]       exit status 0: alive, 1: restart the container

"Ready" is not enough: a server whose ranks hang still answers `/v2/health/live`. One token goes
the whole way through tokenizer, queue and ranks. A full queue is a sign of life: a restart would
lose the requests that wait.
"""

import json
import sys
import urllib.error
import urllib.request


def alive(url, seconds):
    """Whether the server at `url` makes one token, or says that it is busy, within `seconds`."""
    request = urllib.request.Request(
        f"{url}/v2/models/gpt/generate",
        data=json.dumps({"text_input": "a", "max_tokens": 1}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return "text_output" in json.load(answer)
    except urllib.error.HTTPError as error:
        return "the queue is full" in error.read().decode(errors="replace")
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    sys.exit(0 if alive(url, seconds) else 1)
