"""What tests of the client see in the metrics of tests/serving/triton_models.py."""

import time

from utils.serving import metrics

PATIENCE = 60.0


def gone(server):
    """How many requests were cancelled by now."""
    return metrics.scrape(server)["cancelled_total"]


def settled_gone(server):
    return settled(server)["cancelled_total"]


def settled(server):
    """Our metrics when no request of another test is under way any more: a word takes 50 ms."""

    def twice():
        first = metrics.scrape(server)
        time.sleep(0.3)
        return first if first.equals(metrics.scrape(server)) else None

    deadline = time.monotonic() + PATIENCE
    while (found := twice()) is None:
        assert time.monotonic() < deadline
    return found
