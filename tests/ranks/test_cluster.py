"""The recipes of docs/cluster.md: each ends in the line that `launch` prints, and it runs on nodes.

Stand-ins for the commands of Slurm, ssh and Kubernetes record what they are asked to start; the
line itself then runs for real, in network namespaces.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from tests.notebooks import rules as notebook_rules
from utils.paths import ROOT
from utils.ranks.launch import RESTARTING, shell_command
from utils.ranks.nodes import Nodes

DOCS = ROOT / "docs" / "cluster"
REASON = Nodes.available()
needs_nodes = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TRAIN = ["--steps", "2", "--batch", "4", "--seq", "16", "--hidden", "32", "--layers", "1"]
TRAIN += ["--sample", "0", "--metrics", "-"]
LONG_RUN = ["--steps", "100000", "--out", "runs/first", "--auto-resume", "--save-every", "100"]
# a file per call: calls may run concurrently
NOTE = '#!/bin/sh\nprintf "%s\\n" "$@" > "$NOTES/$$"\n'
RANK = """
import os, socket, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
print("started", socket.gethostname(), *(os.environ[name] for name in names), *sys.argv[1:])
"""


@pytest.fixture
def stand_ins(tmp_path):
    """run(script, *words, commands, status, **environment) -> [the words of each stand-in's call].

    status   the exit status that the script must have
    """

    def run(script, *words, commands, inside=False, status=0, **environment):
        notes, folder = Path(tempfile.mkdtemp(dir=tmp_path)), tmp_path / "bin"
        for name, text in commands.items():
            path = (tmp_path / ".venv" / "bin" if inside else folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "NOTES": str(notes), **environment}
        done = subprocess.run(
            ["bash", str(script), *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == status, done.stderr
        return [call.read_text().splitlines() for call in notes.iterdir()]

    return run


def printed(*arguments, ranks=1, nodes=2, **options):
    """The words of the line that `launch` prints, after its variables and torchrun."""
    line = shell_command(["-m", "utils.train", *arguments], ranks, nodes, **options)
    words = shlex.split(line)
    return words[words.index("torchrun") + 1 :]


# --- the scripts end in the line ------------------------------------------------------------------


def test_the_page_shows_the_line_that_launch_prints():
    text = (ROOT / "docs" / "cluster.md").read_text()
    block = re.search(r"```sh\n(OMP_NUM_THREADS=1 torchrun.*?)```", text, re.S)[1]
    arguments = ["--tp", "8", "--pp", "2", "--batch", "512", "--seconds", "600"]
    words = shlex.split(block.replace("\\\n", " "))
    assert words == shlex.split(shell_command(["-m", "utils.train", *arguments], 8, 2))


def test_the_page_shows_the_line_that_restarts():
    text = (ROOT / "docs" / "cluster.md").read_text()
    block = re.search(r"```sh\n(OMP_NUM_THREADS=1 TORCH.*?)```", text, re.S)[1]
    words = shlex.split(block.replace("\\\n", " "))
    arguments = ["--tp", "8", "--batch", "512", *LONG_RUN]
    program = ["-m", "utils.train", *arguments]
    assert words == shlex.split(shell_command(program, 8, nodes=(1, 2), restarts=3))


def test_the_pages_links_lead_somewhere():
    path = ROOT / "docs" / "cluster.md"
    assert list(notebook_rules.broken_links(path.read_text(), path)) == []


def test_slurm_starts_the_line_on_every_node(stand_ins):
    hosts = '#!/bin/sh\ntest "$*" = "show hostnames gpu[7-8]" && printf "gpu7\\ngpu8\\n"\n'
    (words,) = stand_ins(
        DOCS / "slurm.sbatch",
        *TRAIN,
        commands={"srun": NOTE, "scontrol": hosts},
        SLURM_NNODES="2",
        SLURM_JOB_NODELIST="gpu[7-8]",
        SLURM_JOB_ID="4711",
        SLURM_CPUS_PER_TASK="64",
    )
    assert words[0] == ".venv/bin/torchrun"
    assert words[1:] == printed(*TRAIN, ranks=8, head="gpu7", job="4711")


@pytest.mark.parametrize("status", [0, 1])
def test_slurm_goes_back_into_the_queue_until_the_run_is_over(stand_ins, status):
    """A torchrun that was asked to end exits with a nonzero status: test_elastic.py."""
    calls = requeue(stand_ins, srun=f"{NOTE}exit {status}\n")
    (line,) = (call for call in calls if call[0] == ".venv/bin/torchrun")
    again = ["--auto-resume", "--save-every", "100"]
    assert line[1:] == printed(*again, *TRAIN, ranks=8, head="gpu7", job="4711", restarts=3)
    assert [call for call in calls if call != line] == [["requeue", "4711"]] * status


def test_slurm_does_not_repeat_what_fails_at_once_or_always(stand_ins):
    for facts in ({"SHORTEST_TURN": "60"}, {"SLURM_RESTART_COUNT": "50"}):
        calls = requeue(stand_ins, srun=f"{NOTE}exit 1\n", status=1, **facts)
        assert len(calls) == 1


def requeue(stand_ins, srun, **facts):
    hosts = '#!/bin/sh\nif [ "$1" = show ]; then echo gpu7; exit; fi\n'
    job = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[7-8]", "SLURM_JOB_ID": "4711"}
    environment = {**job, "SLURM_CPUS_PER_TASK": "64", "SHORTEST_TURN": "0", **facts}
    commands = {"srun": srun, "scontrol": hosts + NOTE.removeprefix("#!/bin/sh\n")}
    return stand_ins(DOCS / "slurm_requeue.sbatch", *TRAIN, commands=commands, **environment)


def test_the_variables_of_a_restart_are_the_same_everywhere(stand_ins):
    """The variables in front of torchrun reach the ranks of Slurm and of Kubernetes."""
    line = shlex.split(shell_command(["-m", "utils.train"], 8, 2, restarts=3))
    variables = dict(word.split("=") for word in line[: line.index("torchrun")])
    assert variables == {"OMP_NUM_THREADS": "1", **RESTARTING}
    note = '#!/bin/sh\nenv > "$NOTES/$$"\n'
    (seen,) = requeue(stand_ins, srun=note)
    assert set(map("=".join, variables.items())) <= set(seen)
    container = kubernetes_job()[1]["spec"]["template"]["spec"]["containers"][0]
    assert {each["name"]: each["value"] for each in container["env"]} == variables


def kubernetes_job():
    """The Service and the Job of the recipe."""
    service, job = yaml.safe_load_all((DOCS / "job.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    return service, job


def test_kubernetes_says_the_line_that_restarts():
    service, job = kubernetes_job()
    spec = job["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    words = [*container["command"], *container["args"]]
    assert all(isinstance(word, str) for word in words)
    # an Indexed Job numbers its pods, and a headless Service makes their names resolvable
    head = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    arguments = ["--tp", "8", "--pp", "2", "--batch", "512", *LONG_RUN]
    arguments[arguments.index("runs/first")] = "/runs/first"
    assert words[1:] == printed(*arguments, ranks=8, head=head, restarts=3)
    assert words[0] == "torchrun"
    assert spec["completions"] == spec["parallelism"] == 2 and spec["completionMode"] == "Indexed"
    assert (
        service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    )
    label = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["selector"] == label
    # Kubernetes refuses a podFailurePolicy with OnFailure
    assert pod["restartPolicy"] == "Never" and spec["podFailurePolicy"]["rules"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounted)
    assert mounted["runs"] == "/runs" and mounted["shared-memory"] == "/dev/shm"


def test_ssh_starts_the_line_on_every_host(stand_ins):
    awkward = [*TRAIN, "--out", "two words"]
    calls = stand_ins(DOCS / "hosts.sh", DOCS / "hostfile", *awkward, commands={"ssh": NOTE})
    assert sorted(call[1] for call in calls) == ["node0", "node1"]
    for _, _, line in calls:
        folder, command = line.split(" && ")
        assert folder.startswith("cd ")
        assert shlex.split(command)[2:] == printed(*awkward, ranks=8)


def test_jupyterlab_gets_a_port_of_its_own_and_a_log_that_others_cannot_read(stand_ins, tmp_path):
    script, log = DOCS / "slurm_lab.sbatch", tmp_path / "kintsugi-lab-1234.log"
    log.touch(mode=0o644)
    assert stand_ins(script, commands={"make": NOTE}, SLURM_JOB_ID="1234") == [["lab", "PORT=8934"]]
    assert log.stat().st_mode & 0o777 == 0o600  # it contains an address with a token


def test_the_scripts_are_shell_and_their_options_come_before_commands():
    for script in sorted([*DOCS.glob("*.sbatch"), *DOCS.glob("*.sh")]):
        subprocess.run(["bash", "-n", str(script)], check=True)
    for script in DOCS.glob("*.sbatch"):  # sbatch stops reading options at the first command
        lines = script.read_text().splitlines()
        options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
        commands = [number for number, line in enumerate(lines) if line and line[0] != "#"]
        assert options and max(options) < min(commands)


def test_kubernetes_says_the_same_by_variables():
    job = trainjob()
    words = [*job["command"], *job["args"]]
    environment = trainer_variables(job, node=1)
    options = {
        "--nnodes": environment["PET_NNODES"],
        "--nproc-per-node": environment["PET_NPROC_PER_NODE"],
    }
    line = [f"{name}={value}" for name, value in options.items()]
    expected = printed(*job["args"], ranks=8)
    assert (
        words[0] == "torchrun" and [*line, *words[1:]] == expected[:2] + expected[-len(words) + 1 :]
    )
    assert all(isinstance(word, str) for word in words)  # Kubernetes accepts only strings


def trainjob():
    """spec.trainer of the recipe."""
    document = yaml.safe_load((DOCS / "trainjob.yaml").read_text())
    assert document["kind"] == "TrainJob"
    return document["spec"]["trainer"]


def trainer_variables(job, node, ranks=None):
    """The variables that Kubeflow Trainer's torch runtime sets in a pod."""
    return {
        "PET_NNODES": str(job["numNodes"]),
        "PET_NPROC_PER_NODE": str(ranks or job["numProcPerNode"]),
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "node0",
        "PET_MASTER_PORT": "29500",
    }


# --- and the line runs on nodes -------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes():
    with Nodes(2) as nodes:
        yield nodes


@pytest.mark.thorough
@needs_nodes
def test_the_line_trains_on_two_nodes(nodes, capsys):
    table = nodes.launch("utils.train", ranks_per_node=1, args=TRAIN)
    assert table["step"].tolist() == [1, 2]
    assert nodes.sent()[0] > 10_000
    shown = capsys.readouterr().out.splitlines()[0]
    assert shlex.split(shown.partition("$ ")[2])[2:] == printed(*TRAIN)


@pytest.mark.thorough
@needs_nodes
def test_variables_in_place_of_options_start_the_same_ranks(nodes, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    environments = [trainer_variables(trainjob(), node, ranks=1) for node in range(2)]
    command = [sys.executable, "-m", "torch.distributed.run", str(script)]
    ended = nodes.run(command, environments=environments, timeout=200)
    assert [status for status, _ in ended] == [0, 0], ended
    for node, (_, output) in enumerate(ended):
        assert f"started node{node} {node} 2 0 node0" in output


@pytest.mark.thorough
@needs_nodes
def test_deepspeeds_launcher_starts_its_ranks_from_the_host_file(nodes, tmp_path, stand_ins):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# two machines\nnode0 slots=1\nnode1 slots=1\n")
    script = DOCS / "deepspeed.sh"
    note = {"deepspeed": NOTE}
    (words,) = stand_ins(script, hostfile, "--shard", "1", commands=note, inside=True)
    assert words[0] == f"--hostfile={hostfile}" and "--no_ssh" not in words
    assert words[-4:] == ["--engine", "deepspeed", "--shard", "1"]
    (tmp_path / "started.py").write_text(RANK)
    environments, commands = [], []
    for node in range(2):
        (words,) = stand_ins(script, hostfile, commands={}, inside=True, NODE_RANK=str(node))
        assert {"--no_ssh", f"--node_rank={node}"} <= set(words)
        commands.append([word if word != "utils.train" else "started" for word in words])
        environments.append({"NODE_RANK": str(node), "PYTHONPATH": str(tmp_path)})
    launcher = f"{sys.executable} -c 'from deepspeed.launcher.runner import main; main()' "
    cases = [f"{node}) {launcher}{shlex.join(words)} ;;" for node, words in enumerate(commands)]
    choose = f"case $NODE_RANK in {' '.join(cases)} esac"
    ended = nodes.run(["sh", "-c", choose], environments=environments, timeout=250)
    assert [status for status, _ in ended] == [0, 0], ended
    for node, (_, output) in enumerate(ended):
        assert f"started node{node} {node} 2 0 node0 --engine deepspeed" in output
