"""Servers of this room, each started once in a process of tests and ended with the room.

A module takes one under the name `server`, if it does not harm it; `client` talks to that.
"""

import pytest

from tests.serving.probe import MODELS
from tests.serving.processes import PATIENCE
from tests.serving.triton_models import write_models
from tests.serving.world import (
    QUEUE,
    SLOTS,
    Reference,
    configure,
    prompt_file,
    repo_of,
    serving,
)
from utils.serving.client import Client
from utils.serving.server import TritonServer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A failing test comes with the end of its server's log."""
    report = yield
    server = item.funcargs.get("server")
    if report.failed and isinstance(server, TritonServer):
        report.sections.append(("Triton's log", server.tail(60)))
    return report


@pytest.fixture(scope="package")
def small_server(tmp_path_factory):
    """models/small on two ranks as the workshop configures it, with a prompt "imports"."""
    folder = tmp_path_factory.mktemp("small")
    prompt_file(folder / "prompts", "small", "imports", "import os\nimport re\nimport")
    repo = repo_of("small", 2, folder / "repo", prompts=folder / "prompts")
    configure(repo, step_seconds=PATIENCE)  # tests let its ranks stand still
    with serving(repo) as server:
        yield server


@pytest.fixture(scope="package")
def small_reference():
    return Reference("small")


@pytest.fixture(scope="package")
def tiny_server(tmp_path_factory):
    """models/tiny on one rank, with SLOTS slots and a queue of QUEUE."""
    repo = repo_of("tiny", 1, tmp_path_factory.mktemp("tiny") / "repo")
    configure(repo, max_num_seqs=SLOTS, queue=QUEUE, step_seconds=PATIENCE)
    # a client that leaves at the very moment of the last answer: Triton may wait for it for ever
    with serving(repo, models=MODELS, exit_seconds=3) as server:
        yield server


@pytest.fixture(scope="package")
def toy_server(tmp_path_factory):
    """The models of triton_models.py that answer."""
    repo = write_models(tmp_path_factory.mktemp("toys"), "echo", "slow", "gpt", "gpt_engine")
    with serving(repo) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    """For the module's own `server`."""
    return Client(server, timeout=PATIENCE)
