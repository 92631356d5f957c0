"""Nodes: real rendezvous over shaped links; nothing is left, whatever happens inside."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.patience import patience
from utils.ranks import RankError
from utils.ranks import nodes as nodes_module
from utils.ranks.launch import LaunchError
from utils.ranks.nodes import Nodes, NodesError

pytestmark = pytest.mark.thorough
REASON = Nodes.available()
needs_nodes = pytest.mark.skipif(REASON is not None, reason=str(REASON))
MARK = "KINTSUGI_NODES_TEST"  # every process that a test starts inherits this variable

SCRIPT = """
import os, socket, sys, time
rank = int(os.environ["RANK"])
if "fail" in sys.argv:
    if rank == 3:
        time.sleep(0.5)
        raise ValueError("rank three is unhappy")
    time.sleep(300)
import json
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1000,), float(rank))
dist.all_reduce(x)
names = [None] * dist.get_world_size()
dist.all_gather_object(names, socket.gethostname())
if rank == 0:
    print("ready")
    print(json.dumps({"sum": x[0].item(), "names": names}))
dist.destroy_process_group()
"""


def marked(mark):
    """The processes with this mark in their environment."""
    found = []
    for process in psutil.process_iter(["status", "environ", "name"]):
        environment = process.info["environ"] or {}
        if environment.get(MARK) == mark and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(f"{process.pid} {process.info['name']}")
    return [entry for entry in found if not entry.startswith(f"{os.getpid()} ")]


def gone(mark, seconds=60):
    """Whether all of them end within `seconds`."""
    deadline = time.monotonic() + patience(seconds)
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return marked(mark) == []


def interfaces():
    with open("/proc/net/dev") as file:
        return sorted(line.partition(":")[0].strip() for line in file if ":" in line)


@pytest.fixture
def mark(monkeypatch, request):
    """A value of MARK; afterwards no process has it, and the machine's network is as before."""
    value = f"{os.getpid()}-{request.node.name}"
    monkeypatch.setenv(MARK, value)
    before = interfaces() if sys.platform.startswith("linux") else []
    yield value
    assert gone(value), marked(value)
    assert not before or interfaces() == before


@pytest.fixture(scope="module")
def pair():
    with Nodes(2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def four(pair):
    with pair.ranks(per_node=2, timeout=60) as ranks:
        yield ranks


def all_reduce(members, numbers):
    """Seconds of an all-reduce of `numbers` float32 elements among these ranks."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return 0.0
    x = torch.full((numbers,), float(dist.get_rank()))
    dist.all_reduce(torch.zeros(1), group=group)  # connects
    began = time.perf_counter()
    dist.all_reduce(x, group=group)
    seconds = time.perf_counter() - began
    assert x[0].item() == sum(members)
    return seconds


# --- what a node is -------------------------------------------------------------------------------


@needs_nodes
def test_nodes_have_names_and_a_network_of_their_own(pair):
    script = "hostname; getent hosts node1; cat /proc/net/dev"
    ended = pair.run(["sh", "-c", script])
    assert [status for status, _ in ended] == [0, 0]
    for node, (_, output) in enumerate(ended):
        lines = output.splitlines()
        assert lines[0] == f"node{node}"
        assert lines[1].split()[0].endswith("10.77.0.2") and lines[1].split()[1] == "node1"
        names = {line.partition(":")[0].strip() for line in lines[2:] if ":" in line}
        assert names <= {"lo", "eth0", "sit0", "ip6tnl0", "tunl0", "gre0", "gretap0", "erspan0"}


@needs_nodes
def test_several_worlds_do_not_collide(pair):
    with Nodes(3) as others:
        ended = others.run(["sh", "-c", "hostname && cat /etc/hosts"])
        assert [output.splitlines()[0] for _, output in ended] == ["node0", "node1", "node2"]
        assert "node2" in ended[0][1]
        assert "node2" not in pair.run(["cat", "/etc/hosts"])[0][1]


@needs_nodes
def test_traffic_between_nodes_is_counted_and_traffic_inside_a_node_is_free(pair, four):
    size = 4_000_000

    def sent_for(members):
        before = pair.sent()
        four.run(all_reduce, members, size // 4)
        return [after - first for first, after in zip(before, pair.sent())]

    inside = sent_for([0, 1])
    across = sent_for([1, 2])
    assert max(inside) < 0.05 * size, inside
    # two ranks each send 2 (N-1)/N = 1 times the tensor, plus TCP headers and retransmissions
    assert all(0.99 * size < sent < 1.3 * size for sent in across), across


@needs_nodes
def test_the_speed_is_a_limit_and_can_be_changed(pair, four):
    assert pair.gbit is None
    pair.gbit = 0.01
    try:
        seconds = max(four.run(all_reduce, [0, 2], 200_000))
        # 800,000 bytes in each direction, less the initial content of the bucket
        assert seconds > 0.7 * (800_000 - 2 * 65536) * 8 / 0.01e9
        inside = min(max(four.run(all_reduce, [2, 3], 200_000)) for _ in range(3))
        assert inside < seconds
    finally:
        pair.gbit = None
    assert "no limit" in repr(pair)


@needs_nodes
def test_neighbours_may_live_on_different_nodes(pair, four):
    assert four.run(socket.gethostname) == ["node0", "node0", "node1", "node1"]
    with pair.ranks(per_node=2, spread=True) as ranks:
        assert ranks.run(socket.gethostname) == ["node0", "node1", "node0", "node1"]


@needs_nodes
def test_a_failing_rank_on_a_node_is_named_as_everywhere(four):
    def unhappy():
        if dist.get_rank() == 2:
            raise ValueError("unhappy")

    with pytest.raises(RankError, match="unhappy"):
        four.run(unhappy)
    assert four.run(dist.get_rank) == [0, 1, 2, 3]


@needs_nodes
def test_without_root_a_user_namespace_does_the_same(mark, monkeypatch):
    monkeypatch.setattr(nodes_module.os, "geteuid", lambda: 1000)
    if reason := nodes_module._why_not(1000):
        pytest.skip(reason)
    with Nodes(2, gbit=1) as nodes:
        assert nodes._world.user
        assert [output for _, output in nodes.run(["hostname"])] == ["node0", "node1"]
        with nodes.ranks(per_node=1) as ranks:
            before = nodes.sent()
            ranks.run(all_reduce, [0, 1], 100_000)
            assert nodes.sent()[1] - before[1] > 390_000
        nodes.kill(1)
        nodes.revive(1)
        assert [output for _, output in nodes.run(["hostname"])] == ["node0", "node1"]


# --- launch ---------------------------------------------------------------------------------------


@needs_nodes
def test_a_launch_meets_across_nodes(mark, tmp_path, capsys):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with Nodes(2) as nodes:
        table = nodes.launch(path, ranks_per_node=1)
        assert sum(nodes.sent()) > 2 * 4000
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "on each of 2 nodes $ OMP_NUM_THREADS=1 torchrun --nnodes=2 --nproc-per-node=1 "
        f"--rdzv-backend=c10d --rdzv-endpoint=node0:29500 --rdzv-id=1 {path}",
        "ready",
    ]
    assert table["sum"].tolist() == [1.0]
    assert table["names"].tolist() == [["node0", "node1"]]


@needs_nodes
def test_the_node_and_the_rank_that_failed_first_are_named(mark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(nodes_module, "GRACE", 0.5)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with Nodes(2) as nodes, pytest.raises(LaunchError) as error:
        nodes.launch(path, ranks_per_node=2, args=["fail"])
    lines = str(error.value).splitlines()
    assert lines[0] == "On node1 rank 3 failed first:"
    assert "ValueError: rank three is unhappy" in lines


# --- a node that dies, and comes back -------------------------------------------------------------

LISTEN = """
import socket, sys
with socket.create_server(("", 7000)) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    with peer:
        print("connected", flush=True)
        print("heard", peer.recv(1), flush=True)  # b"" is the end of the connection
"""
CONNECT = """
import socket, time

with socket.create_connection(("node0", 7000), timeout=60):
    time.sleep(600)
"""


@needs_nodes
def test_a_node_that_is_killed_is_silent_and_nothing_of_it_is_left(mark):
    """Its link goes down first: the other end of a connection does not see it close."""
    with Nodes(2) as nodes:
        listener = nodes.start(0, [sys.executable, "-c", LISTEN])
        assert listener.answer(patience(60)) == b"listening"
        daemon = ["sh", "-c", "setsid sleep 600 & sleep 600"]
        for command in ([sys.executable, "-c", CONNECT], daemon):
            nodes.start(1, command, environment={MARK: f"{mark}-node1"})
        assert listener.answer(patience(60)) == b"connected"
        on_the_node = psutil.Process(nodes._world.pids[1])
        nodes.kill(1)
        assert not on_the_node.is_running() or on_the_node.status() == psutil.STATUS_ZOMBIE
        assert marked(f"{mark}-node1") == []
        with pytest.raises(TimeoutError):
            listener.answer(1)
        assert nodes.start(0, ["hostname"]).answer(patience(30)) == b"node0"
        with pytest.raises(NodesError, match=r"node1 has been killed: nodes\.revive\(1\)"):
            nodes.run(["true"])


@needs_nodes
def test_a_node_that_comes_back_has_its_name_its_address_and_its_cable(mark):
    with Nodes(2, gbit=0.01) as nodes:
        nodes.kill(0)
        with pytest.raises(NodesError, match="node0 has been killed"):
            nodes.start(0, ["true"])
        nodes.revive(0)
        ended = nodes.run(["sh", "-c", "hostname; ip -4 -o address show eth0"])
        assert [output.split()[0] for _, output in ended] == ["node0", "node1"]
        assert "10.77.0.1/16" in ended[0][1]
        with nodes.ranks(per_node=1) as ranks:
            seconds = max(ranks.run(all_reduce, [0, 1], 200_000))
        assert seconds > 0.7 * (800_000 - 2 * 65536) * 8 / 0.01e9  # still limited


@needs_nodes
def test_ranks_on_a_node_die_with_it(mark):
    with Nodes(2) as nodes, nodes.ranks(per_node=1) as ranks:
        [survivor, victim] = [psutil.Process(pid) for pid in ranks.pids]
        nodes.kill(1)
        assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
        assert survivor.is_running() and survivor.status() != psutil.STATUS_ZOMBIE


@needs_nodes
def test_what_cannot_be_killed_or_revived_is_named(pair):
    for node in (2, -1, True, "1"):
        for call in (pair.kill, pair.revive, lambda node: pair.start(node, ["true"])):
            with pytest.raises(ValueError, match=rf"there is no node {node!r}: give 0 to 1"):
                call(node)
    with pytest.raises(ValueError, match="node1 is up"):
        pair.revive(1)


def test_this_machines_own_processes_are_never_killed(monkeypatch):
    with subprocess.Popen(["sleep", "600"]) as process:
        monkeypatch.setattr(nodes_module.psutil, "pids", lambda: [process.pid])  # if it fails
        try:
            with pytest.raises(NodesError, match="belongs to no node"):
                nodes_module.kill_all_with(process.pid)
            assert process.poll() is None
        finally:
            process.kill()


# --- nothing is left ------------------------------------------------------------------------------


@needs_nodes
def test_a_time_limit_ends_what_runs_on_all_nodes(mark):
    with Nodes(2) as nodes, pytest.raises(LaunchError, match="did not end within 1 s"):
        nodes.run(["sleep", "300"], timeout=1)


@needs_nodes
def test_an_exception_inside_ends_daemons_too(mark):
    daemon = "setsid sh -c 'sleep 300 & sleep 300' >/dev/null 2>&1 & echo started"
    with pytest.raises(ZeroDivisionError), Nodes(2) as nodes:
        assert "started" in nodes.run(["sh", "-c", daemon])[1][1]
        deadline = time.monotonic() + patience(30)  # daemons may start after the command ends
        while sum("sleep" in entry for entry in marked(mark)) < 4:
            assert time.monotonic() < deadline, marked(mark)
            time.sleep(0.05)
        1 / 0  # noqa: B018


@needs_nodes
def test_an_interrupt_ends_what_runs(mark, tmp_path):
    def interrupt_when_it_runs():
        while len(list(tmp_path.iterdir())) < 2:  # a file per node
            time.sleep(0.05)
        time.sleep(0.5)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt_when_it_runs, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), Nodes(2) as nodes:
        nodes.run(["sh", "-c", f"mktemp {tmp_path}/XXXXXX; sleep 300"], timeout=60)


@needs_nodes
def test_a_killed_parent_takes_everything_with_it(mark, tmp_path):
    source = (
        "from utils.ranks.nodes import Nodes\n"
        "nodes = Nodes(2)\n"
        "ranks = nodes.ranks(per_node=1)\n"
        "nodes.run(['sh', '-c', 'setsid sleep 300 & sleep 300'])\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", source], env=environment)
    while sum("sleep" in entry for entry in marked(mark)) < 4:
        assert parent.poll() is None
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    assert gone(mark), marked(mark)
    assert list(tmp_path.glob("nodes-*")) == []


@needs_nodes
def test_a_world_that_was_killed_says_so(mark):
    nodes = Nodes(2)
    nodes._world._process.kill()
    nodes._world._process.wait()
    with pytest.raises(NodesError, match="the nodes are closed"):
        nodes.run(["true"])
    nodes.close()
    nodes.close()


@needs_nodes
def test_nodes_that_nobody_holds_are_closed(mark):
    Nodes(2)
    assert gone(mark)


# --- unsupported machines and invalid arguments --------------------------------------------------


def test_one_sentence_says_why_not(monkeypatch):
    nodes_module._why_not.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(nodes_module.sys, "platform", "darwin")
            assert "need Linux" in Nodes.available()
            with pytest.raises(NodesError, match="need Linux"):
                Nodes(2)
        nodes_module._why_not.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(nodes_module.sys, "platform", "linux")
            patch.setattr(nodes_module.shutil, "which", lambda word, path: None)
            assert Nodes.available().count(".") == 1 and "apt-get install" in Nodes.available()
    finally:
        nodes_module._why_not.cache_clear()


@needs_nodes
def test_a_kernel_that_refuses_is_quoted(monkeypatch):
    nodes_module._why_not.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(nodes_module, "SEARCH", "/nowhere")
            patch.setattr(nodes_module.shutil, "which", lambda word, path: word)
            assert Nodes.available().startswith("This machine does not allow several nodes (")
    finally:
        nodes_module._why_not.cache_clear()


@pytest.mark.parametrize("count", [0, -1, 1.5, 65, "2", True])
def test_a_wrong_number_of_nodes_is_named(count):
    with pytest.raises(ValueError, match="is not a number of nodes"):
        Nodes(count)


@pytest.mark.parametrize("gbit", [0, -1, "fast", float("nan"), 1e9])
def test_a_wrong_bandwidth_is_named(gbit):
    with pytest.raises(ValueError, match="is not a bandwidth"):
        Nodes(2, gbit=gbit)


@needs_nodes
def test_a_wrong_number_of_ranks_is_named(pair):
    with pytest.raises(ValueError, match="ranks_per_node=0"):
        pair.launch("utils.train", ranks_per_node=0)
