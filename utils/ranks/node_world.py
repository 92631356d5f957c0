"""The process that holds the network of `nodes`: a switch, and a cable from it to each node.

    unshare --net --mount --uts --pid --fork --mount-proc python -m utils.ranks.node_world 2 hosts

It is process 1 of its own process namespace, and the switch lives in its network namespace. Each
node is a small process in a network namespace of its own. Nothing is shared with the machine: no
names are used up there, and however this process ends, the kernel kills everything in its process
namespace; the namespaces and cables disappear with the last process in them.

It first writes one JSON line, {"nodes": [pid of each node, as seen inside]}. Then it reads requests
from standard input and answers each with a JSON line, {"error": sentence} if it failed:

    {"gbit": number or null}    the bandwidth of every cable; {}
    {"cut": node}               removes the cable of a node; {}
    {"revive": node}            a new node to replace one that was cut off; {"nodes": [its pid]}

When standard input ends, it removes the folder that holds the file `hosts`, and exits.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

SEARCH = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin:/sbin:/usr/bin:/bin"
CABLE = "eth0"  # the name of a node's end


class NetworkError(RuntimeError):
    """A command failed; the message holds the command and its output."""


def address(node: int) -> str:
    """The IP address of a node; the network is private, so it can be the same everywhere."""
    return f"10.77.{node // 200}.{node % 200 + 1}"


def command(*words: str) -> None:
    """Run a command; raise NetworkError with its own words if it fails."""
    environment = {**os.environ, "PATH": SEARCH}
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        raise NetworkError(f"the command {words[0]} is missing") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise NetworkError(f"{' '.join(words)}: {said}")


def inside(pid: int, *words: str) -> None:
    """Run a command in the network namespace of a process."""
    command("nsenter", "--target", str(pid), "--net", *words)


def start_node(node: int) -> subprocess.Popen:
    """Start a process in a network namespace of its own, with its own host name; return it."""
    waits = f"hostname node{node} && ip link set lo up && echo ready && exec cat"
    process = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", waits],
        stdin=subprocess.PIPE,  # never written to: the node waits until this process ends
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": SEARCH},
    )
    first = process.stdout.readline().strip()
    if first != "ready":
        raise NetworkError(f"a network namespace could not be made: {first or 'no answer'}")
    return process


def connect(node: int, pid: int) -> None:
    """Add a cable between the switch and a node, up at both ends."""
    port = f"port{node}"
    peer = ("peer", "name", CABLE, "netns", str(pid))
    command("ip", "link", "add", port, "type", "veth", *peer)
    command("ip", "link", "set", port, "master", "switch", "addrgenmode", "none", "up")
    inside(pid, "ip", "link", "set", CABLE, "addrgenmode", "none", "up")
    inside(pid, "ip", "address", "add", f"{address(node)}/16", "dev", CABLE)


def limit(pids: dict[int, int], gbit: float | None) -> None:
    """Limit the cable of every node {node: pid} to `gbit` Gbit/s each way; None: no limit.

    There is a token bucket at both ends: for what the node sends, and for what the switch sends to
    it when several others talk to it at once. The bucket holds the traffic of 2 ms, and at least
    64 KiB, because the kernel passes on packets of that size. The queue before it is long, so that
    nothing is lost and TCP does not slow down.
    """
    for node, pid in pids.items():
        shape = ("tc", "qdisc", "replace", "dev")
        if gbit is None:
            inside(pid, *shape, CABLE, "root", "pfifo_fast")
            command(*shape, f"port{node}", "root", "pfifo_fast")
            continue
        bits = round(gbit * 1e9)
        bucket = max(65536, round(bits / 8 * 0.002))
        words = ("root", "tbf", "rate", f"{bits}bit", "burst", f"{bucket}b", "limit", "64mb")
        inside(pid, *shape, CABLE, *words)
        command(*shape, f"port{node}", *words)


def main(count: int, hosts: str) -> int:
    """Build the network, serve requests until standard input closes, then remove the folder."""
    try:
        return serve(count, hosts)
    finally:
        if os.getpid() == 1:  # in its own namespace: no process may write into the folder any more
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        shutil.rmtree(os.path.dirname(hosts), ignore_errors=True)


def serve(count: int, hosts: str) -> int:
    """Serve requests; return the exit status."""
    try:
        command("mount", "--bind", hosts, "/etc/hosts")
        command("ip", "link", "set", "lo", "up")
        command("ip", "link", "add", "switch", "type", "bridge")
        command("ip", "link", "set", "switch", "addrgenmode", "none", "up")
        nodes = {node: start_node(node) for node in range(count)}
        for node, process in nodes.items():
            connect(node, process.pid)
    except (NetworkError, subprocess.TimeoutExpired) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps({"nodes": [process.pid for process in nodes.values()]}), flush=True)
    for line in sys.stdin:
        try:
            print(json.dumps(answer(nodes, json.loads(line))), flush=True)
        except (NetworkError, subprocess.TimeoutExpired) as error:
            print(json.dumps({"error": str(error)}), flush=True)
    return 0


def answer(nodes: dict[int, subprocess.Popen], request: dict) -> dict:
    """Carry out a request; `nodes`, {node: its process}, holds the nodes with a cable."""
    match request:
        case {"cut": node}:
            command("ip", "link", "delete", f"port{node}")
            del nodes[node]
        case {"revive": node}:
            nodes[node] = start_node(node)
            connect(node, nodes[node].pid)
            return {"nodes": [nodes[node].pid]}
        case {"gbit": gbit}:
            limit({node: process.pid for node, process in nodes.items()}, gbit)
    return {}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
