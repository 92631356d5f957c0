"""New versions while the old one serves: promoted without loss, or refused by file name."""

import hashlib
import json
import pickle
import shutil
import threading

import pytest

from tests.serving.probe import MODELS, Asked, generate, gone, processes, stream, tokens
from tests.serving.processes import PATIENCE, until
from tests.serving.world import configure, ranks, repo_of, serving
from utils.serving.client import ServeError
from utils.serving.metrics import metrics
from utils.serving.server import ServerError

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

DOORS = [generate, stream, tokens]
SHARD = "rank-0-of-1.safetensors"


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """Version 1: small on two ranks; version 2, tiny on one, is still outside the repository."""
    folder = tmp_path_factory.mktemp("reload")
    repo = repo_of("small", 2, folder / "repo")
    repo_of("tiny", 1, folder / "other")
    (folder / "other" / "gpt_engine" / "1").rename(folder / "next")
    configure(repo, max_num_seqs=4, queue=16, step_seconds=60)
    return repo


@pytest.fixture(scope="module")
def server(repo):
    with serving(repo, models=MODELS) as server:
        yield server


@pytest.fixture
def second(server, repo):
    """A copy of the next version in the repository; afterwards only version 1 serves again."""
    folder = repo / "gpt_engine" / "2"
    shutil.copytree(repo.parent / "next", folder)
    yield folder
    shutil.rmtree(folder)
    load_first(server)


def load_first(server):
    """Load version 1 alone, and wait until all processes of version 2 have ended."""
    server.load("gpt_engine")
    until(lambda: server.states("gpt_engine", "READY", "UNLOADING") == {1: "READY"})
    until(lambda: len(processes(server)) == 1 + len(MODELS) + 4)  # a second tokenizer, 3 for ranks


def ask(client, door):
    return Asked(door, client, [40, 41] if door is tokens else "def ", max_tokens=8).outcome()


def check_refused(server, client, first, name, *reasons):
    """Loading version 2 fails and names the file; version 1 keeps serving with its own ranks."""
    old = ranks(server)
    with pytest.raises(ServerError) as refusal:
        server.load("gpt_engine")
    assert f"/2/{name}" in str(refusal.value)
    for reason in reasons:
        assert reason in str(refusal.value)
    assert server.versions("gpt_engine") == [1]
    assert [ask(client, door) for door in DOORS] == first
    until(lambda: ranks(server) == old)  # those of version 2 have ended, too


@pytest.fixture(scope="module")
def first(client):
    """Version 1's answers through each door."""
    return [ask(client, door) for door in DOORS]


@pytest.mark.parametrize("name", [SHARD, "tokenizer.json"])
def test_damaged_version_is_refused_by_the_files_name(server, client, first, second, name):
    """Refused by a rank or by the leader; engine/test_faults.py covers other damage."""
    data = (second / name).read_bytes()
    (second / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    check_refused(server, client, first, name)


# ---- pickle


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def put(folder, name, data):
    """Write a file of the version, and list it in the manifest."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_pickle_under_a_shards_name_is_refused_unread(server, client, first, second, tmp_path):
    mark = tmp_path / "read"
    pickle.loads(pickle.dumps(Trap(mark))).close()
    assert mark.exists()  # the trap works
    mark.unlink()
    put(second, SHARD, pickle.dumps(Trap(mark)))
    check_refused(server, client, first, SHARD, "safetensors")
    assert not mark.exists()


def test_pickles_beside_the_shards_are_not_read(server, client, first, second, tmp_path):
    mark = tmp_path / "read"
    names = ["pytorch_model.bin", "rank-0-of-1.pt", "rank-0-of-1.bin", "prompts/all.pkl"]
    (second / "prompts").mkdir(exist_ok=True)
    for name in names:
        put(second, name, pickle.dumps(Trap(mark)))
    server.load("gpt_engine")
    until(lambda: server.versions("gpt_engine") == [2])
    assert [ask(client, door) for door in DOORS] != first
    assert not mark.exists()


# ---- promotion


def test_promotion_under_load(server, client, first, repo):
    """No request is lost; each answer is version 1's or 2's, and after the switch only 2's."""
    folder = repo / "gpt_engine" / "2"
    old, answers, stop = ranks(server), [[] for _ in range(6)], threading.Event()

    def ask_on(mine, door):
        while not stop.is_set():
            mine.append(ask(client, door))

    threads = [
        threading.Thread(target=ask_on, args=(mine, DOORS[number % len(DOORS)]))
        for number, mine in enumerate(answers)
    ]
    try:
        for thread in threads:
            thread.start()
        until(lambda: all(len(mine) >= 2 for mine in answers))
        shutil.copytree(repo.parent / "next", folder.with_name(".next"))
        folder.with_name(".next").rename(folder)
        server.load("gpt_engine")
        until(lambda: server.versions("gpt_engine") == [2])
        switched = [len(mine) for mine in answers]  # requests in flight began before the switch
        until(lambda: all(len(mine) >= n + 3 for mine, n in zip(answers, switched)))
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
        second = [ask(client, door) for door in DOORS]
        assert not set(first) & set(second)
        assert client.answer("def ", max_tokens=1)["weights_version"] == "2"
        for number, mine in enumerate(answers):
            one, two = first[number % len(DOORS)], second[number % len(DOORS)]
            lost = [answer for answer in mine if isinstance(answer, ServeError)]
            assert not lost, lost
            assert set(mine) == {one, two}
            assert set(mine[switched[number] + 1 :]) == {two}
            assert mine == sorted(mine, key=[one, two].index)  # never back again
        until(lambda: gone(old))
        until(lambda: len(ranks(server)) == 1)  # version 1 has no ranks but may still exist
    finally:
        stop.set()
        shutil.rmtree(folder, ignore_errors=True)
        load_first(server)
    shown = metrics(server).set_index("name").loc["kintsugi_ready"]
    assert dict(zip(shown["version"], shown["value"])) == {"1": 1, "2": 0}
    assert [ask(client, door) for door in DOORS] == first
    assert client.answer("def ", max_tokens=1)["weights_version"] == "1"
