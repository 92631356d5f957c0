"""Servers of this room, each started once per test process and stopped after the room's tests.

A module that does not harm a server takes it as `server`; `client` talks to it.
"""

from contextlib import ExitStack

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
    with_template,
)
from utils.serving.client import Client
from utils.serving.server import TritonServer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Add the end of the server's log to the report of a failing test."""
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
    configure(repo, step_seconds=PATIENCE)  # tests stop its ranks for a while
    with serving(repo) as server:
        yield server


@pytest.fixture(scope="package")
def small_reference():
    return Reference("small")


@pytest.fixture(scope="package")
def traces(tmp_path_factory):
    """The file of tiny_server's traces."""
    return tmp_path_factory.mktemp("traces") / "traces.jsonl"


@pytest.fixture(scope="package")
def tiny_server(tmp_path_factory, traces):
    """models/tiny on one rank: SLOTS slots, a queue of QUEUE, a chat template, prompt "imports"."""
    folder = tmp_path_factory.mktemp("tiny")
    prompt_file(folder / "prompts", "tiny", "imports", "import os\nimport")
    model = with_template("tiny", folder / "tiny")
    repo = repo_of(model, 1, folder / "repo", prompts=folder / "prompts")
    configure(repo, max_num_seqs=SLOTS, queue=QUEUE, step_seconds=PATIENCE)
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KINTSUGI_TRACE", str(traces))
            # if a client leaves just as its last answer is sent, Triton may wait forever
            server = stack.enter_context(serving(repo, models=MODELS, exit_seconds=3))
        yield server


@pytest.fixture(scope="package")
def toy_server(tmp_path_factory):
    """The models of triton_models.py that answer."""
    repo = write_models(tmp_path_factory.mktemp("toys"), "echo", "slow", "gpt", "gpt_engine")
    with serving(repo) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    """A client of the module's own `server`."""
    return Client(server, timeout=PATIENCE)
