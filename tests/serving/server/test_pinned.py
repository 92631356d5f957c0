"""Two versions, one of them pinned: only the death of its ranks takes `gpt` out of service."""

import json
import os
import signal
from contextlib import contextmanager

import pytest

from tests.serving.probe import processes
from tests.serving.processes import children, until
from tests.serving.world import configure, post, repo_of, serving
from utils.serving.metrics import metrics

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """Version 1 of tiny, pinned, and version 2, the same."""
    repo = repo_of("tiny", 1, tmp_path_factory.mktemp("pinned") / "repo")
    repo_of("tiny", 1, repo, version=2)
    config = repo / "gpt_engine" / "config.pbtxt"
    config.write_text(config.read_text().replace("num_versions: 1", "num_versions: 2"))
    configure(repo, "gpt", weights_version=1)
    return repo


@pytest.fixture(scope="module")
def server(repo):
    with serving(repo) as server:
        yield server


@contextmanager
def ranks_down(server, repo, version):
    """The ranks of a version die, and do not start while its file is damaged."""
    file = repo / "gpt_engine" / version / "rank-0-of-1.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    stub = f"/gpt_engine/{version}/model.py"
    [leader] = [pid for pid, words in processes(server).items() if stub in words]
    for rank in [rank for above in children(leader) for rank in children(above)]:
        os.kill(rank, signal.SIGKILL)
    until(lambda: gauge(server, "ready")[version] == 0)
    try:
        yield
    finally:
        file.write_bytes(whole)
    until(lambda: gauge(server, "ready")[version] == 1)


def gauge(server, name):
    """{version: value}"""
    shown = metrics(server).set_index("name").loc[[f"kintsugi_{name}"]]
    return dict(zip(shown["version"], shown["value"]))


def version_of(server):
    """The version that answers text; None: no answer."""
    status, said = post(server, text_input="def ", max_tokens=1)
    return json.loads(said)["weights_version"] if status == 200 else None


def test_the_death_of_a_candidate_changes_nothing(server, repo):
    until(lambda: gauge(server, "answers_gpt") == {"1": 1, "2": 0})
    with ranks_down(server, repo, "2"):
        assert server.ready("gpt") and version_of(server) == "1"
    assert server.ready("gpt") and gauge(server, "answers_gpt") == {"1": 1, "2": 0}


def test_the_death_of_the_pinned_version_is_seen_until_another_one_is_pinned(server, repo):
    with ranks_down(server, repo, "1"):
        until(lambda: not server.ready("gpt"))
        until(lambda: max(gauge(server, "answers_gpt").values()) == 0)
        assert gauge(server, "ready")["2"] == 1
        configure(repo, "gpt", weights_version=2)
        until(lambda: server.ready("gpt") and version_of(server) == "2")
        until(lambda: gauge(server, "answers_gpt") == {"1": 0, "2": 1})
    assert server.ready("gpt") and version_of(server) == "2"
