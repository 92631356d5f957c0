"""docs/serving.md and its files agree with the code.

No container and no Kubernetes runs here. What their files name (image, arguments, paths, metric,
probe, hook) is compared with the code; probe and hook talk to a real server.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from tests.notebooks import rules as notebook_rules
from tests.serving.probe import Asked, frozen, served_now, stream
from tests.serving.processes import until
from tests.serving.triton_models import settled
from tests.serving.world import QUEUE, SLOTS, Reference, ranks
from utils.paths import ROOT
from utils.serving.client import Client
from utils.serving.engine.config import EngineConfig
from utils.serving.gateway import Gateway
from utils.serving.gateway.__main__ import parse as gateway_options
from utils.serving.install import CLOSED, CONTROL, IMAGE, RESTRICTED
from utils.serving.metrics import metrics
from utils.serving.server import container_command
from utils.serving.server.__main__ import parse as server_options

pytestmark = pytest.mark.thorough

DOCS = ROOT / "docs" / "serving"
PAGE = (ROOT / "docs" / "serving.md").read_text()


@pytest.fixture(scope="module")
def kinds():
    """{kind: document} of kubernetes.yaml."""
    documents = yaml.safe_load_all((DOCS / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


@pytest.fixture(scope="module")
def container(kinds):
    return kinds["Deployment"]["spec"]["template"]["spec"]["containers"][0]


@pytest.fixture(scope="module")
def front(kinds):
    """The gateway's container."""
    return kinds["Deployment"]["spec"]["template"]["spec"]["containers"][1]


def words(command):
    return shlex.split(command.replace("\\\n", " "))


def test_the_links_lead_somewhere():
    for page in (ROOT / "docs" / "serving.md", ROOT / "triton_model_repo" / "README.md"):
        assert list(notebook_rules.broken_links(page.read_text(), page)) == []


def test_the_page_shows_the_containers_command():
    block = re.search(r"```sh\n(docker run.*?)```", PAGE, re.S)[1]
    folder = ROOT / "triton_model_repo"
    assert words(block.replace("$PWD/triton_model_repo", str(folder))) == words(
        container_command(folder)
    )


def test_the_page_names_every_field_of_a_request():
    config = (ROOT / "triton_model_repo" / "gpt" / "config.pbtxt").read_text()
    inputs = config[config.index("input [") : config.index("output [")]
    fields = set(re.findall(r'name: "(\w+)"', inputs))
    table = PAGE[PAGE.index("| field |") : PAGE.index("`generate` wants")]
    assert fields == set(re.findall(r"`([a-z_]+)`", table))


def test_the_page_names_every_option_of_the_engine():
    table = PAGE[PAGE.index("| parameter | meaning") : PAGE.index("The export prints what a rank")]
    options = {field.name for field in fields(EngineConfig)}
    assert options == {name for name in re.findall(r"`([a-z_]+)`", table) if name != "config"}


def test_the_pages_grpc_client_runs(server):
    said = run(snippet("import tritonclient.grpc").replace("localhost:8001", server.grpc))
    assert said == Client(server).generate("import ", max_tokens=16)


def test_the_pages_openai_client_runs(server):
    with Gateway(server) as gateway:
        said = run(snippet("from openai import").replace("localhost:8000", gateway.http))
    text = Client(server).generate("def ", max_tokens=16, exclude_input_in_output=True)
    assert re.fullmatch(rf"{re.escape(text)} \d+ weights-1\n", said)


def snippet(line):
    """The page's Python block that contains this line."""
    (found,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if line in code]
    return found


def run(code):
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_make_serve_takes_ports():
    make = ["make", "--dry-run", "serve", "HTTP=9000", "GRPC=9001", "METRICS=9002"]
    ran = subprocess.run(make, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "utils.serving.server --http 9000 --grpc 9001 --metrics 9002" in ran.stdout


def test_the_unit_starts_the_command():
    unit = (DOCS / "kintsugi.service").read_text()
    lines = dict(re.findall(r"^(\w+)=(.*)$", unit, re.M))
    python, *command = shlex.split(lines["ExecStart"])
    assert python == f"{lines['WorkingDirectory']}/.venv/bin/python"
    assert command[:2] == ["-m", "utils.serving.server"]
    options = server_options(command[2:])
    assert options.log.startswith(f"/var/log/{lines['LogsDirectory']}/")
    assert int(lines["TimeoutStopSec"]) > 4 * options.exit_seconds  # gateway, gpt, server, kill


def test_board_alerts_and_page_name_metrics_that_are_there(server):
    until(lambda: "time_to_first_token_seconds_bucket" in " ".join(metrics(server)["name"]))
    real = {name for name in metrics(server)["name"] if name.startswith("kintsugi_")}
    parts = re.compile(r"_(bucket|sum|count)$")
    named = set(re.findall(r"`(kintsugi_\w+)`", PAGE))
    fronts = {name for name in named if name.startswith("kintsugi_gateway_")}
    assert named - fronts == {parts.sub("", name) for name in real}
    with Gateway(server) as gateway:
        got(gateway.http, "/v2/health/live")
        found = re.findall(r"^(kintsugi_gateway_\w+)[{ ]", got(gateway.http, "/metrics"), re.M)
    made = {name for name in found if not name.endswith("_created")}
    assert fronts == {parts.sub("", name) for name in made}
    board = json.loads((DOCS / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((DOCS / "alerts.yaml").read_text())["groups"][0]["rules"]
    asked += [rule["expr"] for rule in rules]
    assert len(asked) > 20
    for expression in asked:
        found = re.findall(r"kintsugi_\w+", expression)
        assert found and set(found) <= real | made, expression
    assert any("kintsugi_gateway" in rule["expr"] for rule in rules)


def test_kubernetes_starts_the_same_server_as_the_page(container):
    command = words(container_command("/models", gpus=None))
    begin = command.index("tritonserver")

    def settled(arguments):  # each chooses its own limit for the last requests
        return {word for word in arguments if not word.startswith("--exit-timeout-secs")}

    assert container["image"] == IMAGE and container["command"] == ["tritonserver"]
    assert settled(container["args"]) >= settled(command[begin + 1 :])
    # plus what TritonServer adds when it has a key
    source = (ROOT / "utils" / "serving" / "server" / "triton_server.py").read_text()
    more = settled(container["args"]) - settled(command[begin + 1 :])
    assert all(word.partition("=")[0] in source for word in more)
    assert f"--http-restricted-api={RESTRICTED}:{CONTROL}=$(TRITON_KEY)" in more
    assert f"--grpc-restricted-protocol={RESTRICTED}:{CLOSED}" in container["args"]
    # closed to other pods: the pod's address leads to the gateway
    assert {f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")} <= more
    assert "ports" not in container


def test_kubernetes_starts_the_gateway_of_the_page(kinds, front):
    waits, command = front["args"][0].split("done; ")
    assert waits == "until pid=$(pgrep -o tritonserver); do sleep 1; "
    words_of = words(command.replace("$pid", "1"))
    assert words_of[:4] == ["exec", "python3", "-m", "utils.serving.gateway"]
    options = gateway_options(words_of[4:])
    ports = {port["name"]: port["containerPort"] for port in front["ports"]}
    assert ports == {"https": options.port, "grpc": options.grpc_port}
    keys = re.findall(r"KINTSUGI_\w+", (ROOT / "utils/serving/gateway/__main__.py").read_text())
    assert {entry["name"] for entry in front["env"]} == set(keys)
    rules = kinds["NetworkPolicy"]["spec"]["ingress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == {"https", "grpc"}


def test_no_container_may_more_than_it_must(kinds, container, front):
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    for one in (container, front):
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        written = {mount["mountPath"] for mount in one["volumeMounts"] if not mount.get("readOnly")}
        assert written <= {"/tmp", "/dev/shm"}
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind, place in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert kinds[kind]["spec"][place]["matchLabels"].items() <= labels.items()


def test_a_pod_lives_longer_than_the_requests_in_it(kinds, container, front):
    """The gateway, too, serves until leave.py's pause is over."""
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (limit,) = [word for word in container["args"] if word.startswith("--exit-timeout-secs")]
    *_, pause, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    before = int(pause) + int(seconds)
    assert pod["terminationGracePeriodSeconds"] > before + int(limit.partition("=")[2])
    options = front["args"][0].split()
    assert options[options.index("--drain-seconds") + 1] == pause


def test_pods_come_and_go_one_by_one(kinds, container, front):
    spec = kinds["Deployment"]["spec"]
    assert "replicas" not in spec  # else each `apply` would undo the autoscaler's work
    assert kinds["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"] == spec["selector"]
    for one in (container, front):  # a large model is not killed while it loads
        probe = one["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
        assert "initialDelaySeconds" not in one["livenessProbe"]
        assert spec["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]
    alive, engine = container["livenessProbe"], EngineConfig()  # ranks may be restarting
    between = alive["periodSeconds"] * (alive["failureThreshold"] - 1)
    assert between > engine.step_seconds + engine.start_seconds


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_what_the_page_applies(kinds):
    made = subprocess.run(["kubectl", "kustomize", DOCS], capture_output=True, timeout=60)
    built = {document["kind"]: document for document in yaml.safe_load_all(made.stdout)}
    assert set(built) == {*kinds, "ConfigMap"}
    assert set(built["ConfigMap"]["data"]) == {"alive.py", "leave.py"}


def test_what_kubernetes_mounts_is_there(kinds, container, front):
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    mounted = container["volumeMounts"] + front["volumeMounts"]
    assert {mount["name"] for mount in mounted} == {volume["name"] for volume in pod["volumes"]}
    made = yaml.safe_load((DOCS / "kustomization.yaml").read_text())
    (config,) = made["configMapGenerator"]
    assert {"name": config["name"]} in [volume.get("configMap") for volume in pod["volumes"]]
    assert all((DOCS / file).is_file() for file in made["resources"] + config["files"])
    assert all(isinstance(word, str) for word in container["args"])


def test_the_service_and_the_autoscaler_mean_this_deployment(kinds, container, front):
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"].items() <= labels.items()
    ports = {port["name"] for port in front["ports"]}
    assert {port["targetPort"] for port in kinds["Service"]["spec"]["ports"]} <= ports
    target = kinds["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == kinds["Deployment"]["metadata"]["name"]


# --- with a real server ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tiny_server):
    return tiny_server


@pytest.mark.timeout(600)
def test_probes_metric_and_hook_are_those_of_a_real_server(kinds, container, front, server):
    with Gateway(server) as gateway:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert got(gateway.http, front[probe]["httpGet"]["path"]) is not None
    (scaled,) = kinds["HorizontalPodAutoscaler"]["spec"]["metrics"]
    until(lambda: f"\n{scaled['pods']['metric']['name']}{{" in got(server.metrics, "/metrics"))
    alive = container["livenessProbe"]["exec"]["command"]
    assert status(alive, server) == 0

    *command, pause, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    stream = Client(server).stream("import ", max_tokens=200, temperature=0)
    text = next(stream)
    assert int(pause) > 0
    assert status([*command, "0", seconds], server) == 0  # meanwhile the stream goes on
    text += "".join(stream)
    assert text == "import " + Reference("tiny").text("import ", 200)
    assert not server.ready("gpt")
    assert status(alive, server) == 1
    server.load("gpt")  # for the other tests of this server


@pytest.mark.timeout(600)
def test_a_busy_server_is_alive_and_a_hanging_one_is_not(container, server):
    *command, _ = container["livenessProbe"]["exec"]["command"]
    with frozen(*ranks(server)):  # no request ends before the last one is in the queue
        asked = [
            Asked(stream, Client(server), "import ", max_tokens=300, temperature=1.0, seed=number)
            for number in range(SLOTS + QUEUE)
        ]
        until(lambda: served_now(server) == SLOTS + QUEUE)
    assert status([*command, "0.8"], server) == 0  # a token would come too late
    with frozen(*ranks(server)):
        more = [Asked(stream, Client(server), "def ") for _ in range(SLOTS + QUEUE)]
        until(lambda: served_now(server) >= SLOTS + QUEUE)
        settled(server)
        assert status([*command, "2"], server) == 1  # even with a full queue
    for each in asked + more:
        each.outcome()


def got(address, path):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
        return answer.read().decode()


def status(command, server):
    """The exit status of a probe or hook, run as the pod runs it, against this server."""
    python, script, url, *words = command
    assert (python, url) == ("python3", "http://127.0.0.1:8000")
    line = [sys.executable, str(DOCS / Path(script).name), f"http://{server.http}", *words]
    line += [f"http://{server.metrics}/metrics"] if "alive" in script else []
    key = {"TRITON_KEY": server.control_key}
    return subprocess.run(line, env=os.environ | key, timeout=200).returncode
