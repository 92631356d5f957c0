"""A class on Kubernetes: docs/class/values.yaml, its Dockerfile and pull.sh.

These tests need no Docker or Kubernetes. KubeSpawner, which starts seats in the chart's hub, makes
pods from the values; they are compared with Kubernetes' API. The Dockerfile goes through a linter,
and the files that it names must exist. pull.sh runs on real repositories. If KINTSUGI_CHART is the
folder `jupyterhub` of the chart (a clone of zero-to-jupyterhub-k8s at the version of values.yaml),
the values are also validated against the chart's schema.
"""

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import firstuseauthenticator
import jsonschema
import jupyterhub.app
import jupyterhub.auth
import nbformat
import pytest
import yaml
from jupyterhub import orm
from jupyterhub.objects import Hub
from jupyterhub.user import User
from kubernetes_asyncio import client
from kubernetes_asyncio.config import kube_config
from kubespawner import KubeSpawner
from traitlets.config import Config

from tests.notebooks import rules as notebook_rules
from utils.course.progress import HERE
from utils.paths import ROOT

pytestmark = pytest.mark.thorough

DOCS = ROOT / "docs" / "class"
VALUES = yaml.safe_load((DOCS / "values.yaml").read_text())
SEAT = VALUES["singleuser"]
PROFILES = {profile["slug"]: profile for profile in SEAT["profileList"]}
CHART = os.environ.get("KINTSUGI_CHART")

# The spawner's settings, and the keys below `singleuser` from which the chart takes them.
TRAITS = {
    "start_timeout": "startTimeout",
    "uid": "uid",
    "fs_gid": "fsGid",
    "lifecycle_hooks": "lifecycleHooks",
    "cpu_guarantee": "cpu.guarantee",
    "cpu_limit": "cpu.limit",
    "mem_guarantee": "memory.guarantee",
    "mem_limit": "memory.limit",
    "profile_list": "profileList",
}


def look_up(values: dict, path: str):
    for word in path.split("."):
        values = values[word]
    return values


# --- the pods that KubeSpawner makes --------------------------------------------------------------


def settings() -> dict:
    """The spawner's settings, as the chart makes them from the values."""
    home = {"name": "volume-{user_server}", "mountPath": SEAT["storage"]["homeMountPath"]}
    claim = {"name": home["name"], "persistentVolumeClaim": {"claimName": "{pvc_name}"}}
    return {
        **{trait: look_up(SEAT, path) for trait, path in TRAITS.items()},
        "image": "{name}:{tag}".format(**SEAT["image"]),
        "allow_privilege_escalation": SEAT["allowPrivilegeEscalation"],
        "default_url": SEAT["defaultUrl"],
        "cmd": "jupyterhub-singleuser",
        "storage_pvc_ensure": True,
        "storage_capacity": SEAT["storage"]["capacity"],
        "volumes": [claim, *SEAT["storage"]["extraVolumes"]],
        "volume_mounts": [home, *SEAT["storage"]["extraVolumeMounts"]],
        **VALUES["hub"]["config"]["KubeSpawner"],
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(profile, **options) -> (pod, claim) of a learner's choice, as JSON."""
    address = tmp_path_factory.mktemp("cluster") / "config"
    cluster = {"name": "class", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "class", "context": {"cluster": "class", "user": "class"}}
    user = {"name": "class", "user": {}}
    access = {"clusters": [cluster], "contexts": [context], "users": [user]}
    address.write_text(yaml.safe_dump({**access, "current-context": "class"}))
    patch = pytest.MonkeyPatch()
    patch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(address))
    database = orm.new_session_factory("sqlite:///:memory:")()
    learner = orm.User(name="learner-1")
    database.add(learner)
    database.commit()

    async def make(profile, options):
        config = Config(KubeSpawner=settings())
        known = {"spawner_class": KubeSpawner, "config": config, "hub": Hub(ip="10.0.0.1")}
        spawner = User(learner, known, db=database).get_spawner("", replace_failed=True)
        spawner.user_options = {"profile": profile, **options}
        await spawner.load_user_options()
        async with client.ApiClient() as api:
            documents = await spawner.get_pod_manifest(), spawner.get_pvc_manifest()
            return tuple(api.sanitize_for_serialization(document) for document in documents)

    def fresh(profile, **options):
        learner.orm_spawners.clear()
        User(learner, {}, db=database).spawners.clear()
        return asyncio.run(make(profile, options))

    yield fresh
    patch.undo()
    database.close()


def wrong(value, kind: str, where: str):
    """Yield a line for everything in `value` (JSON) that Kubernetes does not allow in `kind`."""
    plain = {"str": str, "int": int, "bool": bool, "object": object}
    if inner := re.fullmatch(r"(?:list\[|dict\(str, )(.+)[\])]", kind):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from wrong(item, inner[1], f"{where}.{key}")
    elif kind in plain:
        # quantities may be numbers
        allowed = (str, int, float) if ".resources." in where else plain[kind]
        if not isinstance(value, allowed):
            yield f"{where} is {value!r} and not {kind}"
    else:
        model = getattr(client, kind)
        names = {name: attribute for attribute, name in model.attribute_map.items()}
        for name in value.keys() - names:
            yield f"{where} has no {name}"
        known = {names[name]: item for name, item in value.items() if name in names}
        for attribute, item in known.items():
            yield from wrong(item, model.openapi_types[attribute], f"{where}.{attribute}")
        try:
            model(**known)
        except ValueError as error:  # missing and required
            yield f"{where}: {error}"


CHOICES = [("cpu", {}, 0), ("gpu", {}, 1), ("gpus", {}, 2)]
CHOICES += [("gpus", {"gpus": "four"}, 4), ("gpus", {"gpus": "eight"}, 8)]
EACH = pytest.mark.parametrize("profile, options, gpus", CHOICES)


def test_each_profile_and_choice_is_tried():
    choices = {(profile, *options.values()) for profile, options, _ in CHOICES}
    offered = {(slug,) for slug in PROFILES}
    for slug, profile in PROFILES.items():
        for option in profile.get("profile_options", {}).values():
            chosen = {c for c, choice in option["choices"].items() if not choice.get("default")}
            offered |= {(slug, choice) for choice in chosen}
    assert choices == offered


@EACH
def test_kubernetes_knows_each_word_of_the_pod(made, profile, options, gpus):
    pod, claim = made(profile, **options)
    assert list(wrong(pod, "V1Pod", "pod")) == []
    assert list(wrong(claim, "V1PersistentVolumeClaim", "claim")) == []


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda spec: spec["volumes"][1]["emptyDir"].update(size="2Gi"), "has no size"),
        (lambda spec: spec["volumes"][1].pop("name"), "must not be `None`"),
        (lambda spec: spec["containers"][0]["securityContext"].update(runAsUser="1"), "not int"),
    ],
)
def test_a_word_that_kubernetes_does_not_know_is_found(made, change, complaint):
    pod, _ = made("cpu")
    change(pod["spec"])
    (line,) = wrong(pod, "V1Pod", "pod")
    assert complaint in line


@EACH
def test_a_seat_gets_what_its_profile_says(made, profile, options, gpus):
    pod, claim = made(profile, **options)
    spec, (seat,) = pod["spec"], pod["spec"]["containers"]
    have = seat["resources"]["limits"]
    assert int(have.get("nvidia.com/gpu", 0)) == gpus
    assert have["cpu"] >= seat["resources"]["requests"]["cpu"] > 0
    assert have["memory"] >= seat["resources"]["requests"]["memory"] > 1e9
    assert seat["image"].endswith("-cuda") == bool(gpus)
    assert bool(spec.get("nodeSelector")) == bool(gpus)
    # a profile's tolerations replace the chart's own
    tolerated = [toleration["key"] for toleration in spec.get("tolerations", [])]
    dedicated = ["hub.jupyter.org/dedicated", "hub.jupyter.org_dedicated"]
    assert tolerated == (["nvidia.com/gpu", *dedicated] if gpus else [])
    assert claim["spec"]["resources"]["requests"]["storage"] == SEAT["storage"]["capacity"]


@EACH
def test_a_seat_has_no_rights_that_it_does_not_need(made, profile, options, gpus):
    spec = made(profile, **options)[0]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    rights = spec["containers"][0]["securityContext"]
    assert rights["allowPrivilegeEscalation"] is False and not rights.get("privileged")
    assert rights["runAsUser"] == 1000 and rights["runAsNonRoot"] is True
    assert rights["capabilities"] == {"drop": ["ALL"]}


def test_ranks_have_shared_memory_and_files_a_home(made):
    spec = made("cpu")[0]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {m["mountPath"]: volumes[m["name"]] for m in spec["containers"][0]["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts["/home/learner"]["persistentVolumeClaim"] == {"claimName": "claim-learner-1"}


def test_each_setting_is_one_of_its_class():
    overrides = [profile.get("kubespawner_override", {}) for profile in PROFILES.values()]
    for profile in PROFILES.values():
        for option in profile.get("profile_options", {}).values():
            overrides += [choice["kubespawner_override"] for choice in option["choices"].values()]
    named = {name for override in overrides for name in override}
    assert len(named) > 5 and named <= set(KubeSpawner.class_trait_names(config=True))
    classes = {
        "JupyterHub": jupyterhub.app.JupyterHub,
        "Authenticator": jupyterhub.auth.Authenticator,
        "FirstUseAuthenticator": firstuseauthenticator.FirstUseAuthenticator,
        "KubeSpawner": KubeSpawner,
    }
    for section, words in VALUES["hub"]["config"].items():
        assert set(words) <= set(classes[section].class_trait_names(config=True)), section


@pytest.mark.skipif(not CHART, reason="KINTSUGI_CHART is not set")
def test_the_chart_takes_the_values():
    def merged(old, new):
        if not (isinstance(old, dict) and isinstance(new, dict)):
            return new
        return {**old, **{name: merged(old.get(name), value) for name, value in new.items()}}

    schema = yaml.safe_load(Path(CHART, "values.schema.yaml").read_text())
    defaults = yaml.safe_load(Path(CHART, "values.yaml").read_text())
    jsonschema.validate(merged(defaults, VALUES), schema)
    hub = yaml.safe_load(Path(CHART, "Chart.yaml").read_text())["appVersion"]
    assert hub == arguments()["JUPYTERHUB"]
    # it makes the spawner's settings as `settings` does
    code = Path(CHART, "files", "hub", "jupyterhub_config.py").read_text()
    for trait, path in TRAITS.items():
        same = re.sub("_([a-z])", lambda letter: letter[1].upper(), trait) == path
        assert f'("{trait}", {None if same else json.dumps(path)})' in code


# --- the image ------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions: (word, arguments)."""
    text = re.sub(r"^#.*\n", "", (DOCS / "Dockerfile").read_text(), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line]


def all_of(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def arguments() -> dict[str, str]:
    return dict(argument.split("=") for argument in all_of("ARG"))


def environment() -> dict[str, str]:
    (words,) = all_of("ENV")
    return dict(word.split("=", 1) for word in shlex.split(words))


def packages(text: str) -> set[str]:
    return set(re.search(r"--no-install-recommends(.*?)&&", text)[1].split())


def test_a_linter_reads_the_dockerfile():
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, DOCS / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_shell_reads_what_it_runs():
    runs = [re.sub(r"^(--\S+ )+", "", run) for run in all_of("RUN")]
    assert len(runs) == 5
    for run in runs:
        subprocess.run(["sh", "-n", "-c", run], check=True)


def test_what_is_copied_is_in_git():
    for copy in all_of("COPY"):
        *sources, target = copy.split()
        assert target.endswith(("/", "."))
        for source in sources:
            command = ["git", "ls-files", "--error-unmatch", source]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_set_up_runs_with_the_files_that_are_copied_first(tmp_path):
    """It stops at the choice of torch, which is wrong, so that nothing is downloaded."""
    for copy in all_of("COPY")[:2]:
        *sources, target = copy.split()
        (tmp_path / target).mkdir(parents=True, exist_ok=True)
        for source in sources:
            shutil.copy(ROOT / source, tmp_path / target)
    (command,) = (run for run in all_of("RUN") if "make setup" in run)
    command = command[command.index("make") :].replace("$TORCH", "wrong")
    variables = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert "Set-up stopped. TORCH=wrong is unknown" in done.stderr
    assert (tmp_path / ".venv" / "bin" / "python").exists()


def test_its_packages_are_those_of_a_bare_machine():
    """.ci/run lists what a clean clone needs; a seat has no browser and makes no seats."""
    bare = (ROOT / ".ci" / "run").read_text()
    wanted = set(re.findall(r"^needs (\S+)", bare, re.M))
    wanted |= {"python3", "python3-venv", "python3-dev"}
    wanted = wanted - {"chromium", "bubblewrap"} | {"ca-certificates", "tini"}
    assert packages(all_of("RUN")[0]) == wanted


def test_make_sets_up_nothing_in_a_copy():
    variables = {**os.environ, "MAKEFLAGS": environment()["MAKEFLAGS"]}
    command = ["make", "--dry-run", "--no-print-directory", "progress"]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [": --quiet", "python -m utils.course.progress"]


def test_image_and_values_name_the_same_places():
    home = SEAT["storage"]["homeMountPath"]
    assert home == f"/home/{all_of('RUN')[1].split()[-1]}" == all_of("WORKDIR")[-1]
    assert str(SEAT["uid"]) == all_of("USER")[-1] == re.search(r"--uid (\d+)", all_of("RUN")[1])[1]
    course, copy = all_of("WORKDIR")[0], environment()["PYTHONPATH"]
    hook = SEAT["lifecycleHooks"]["postStart"]["exec"]["command"][-1].replace("$HOME", home)
    program, _, branch, folder = shlex.split(hook.split(">")[0])
    assert program == f"{course}/docs/class/pull.sh" and os.access(DOCS / "pull.sh", os.X_OK)
    assert branch == "main" and folder == copy == f"{home}/kintsugi"
    page = Path(home) / SEAT["defaultUrl"].removeprefix("/lab/tree/")
    assert page.relative_to(copy) == HERE.relative_to(ROOT)  # which pull.sh writes
    lab_settings = Path(environment()["JUPYTER_CONFIG_PATH"])
    assert (ROOT / lab_settings.relative_to(course)).is_dir()
    (hub,) = re.findall(r"JupyterHub ([\d.]+) and KubeSpawner", (DOCS / "values.yaml").read_text())
    assert hub == arguments()["JUPYTERHUB"]


# --- pulling the course ---------------------------------------------------------------------------

LESSON, OTHER = "notebooks/01_data_parallel.ipynb", "notebooks/02_gradient_accumulation.ipynb"
LAB = "labs/01_data_parallel/ring.py"


@pytest.fixture
def git(tmp_path):
    """git(folder, *words) -> its output; with its own user name and no other settings."""
    names = {f"GIT_{who}_NAME": "tests" for who in ("AUTHOR", "COMMITTER")}
    mails = {f"GIT_{who}_EMAIL": "tests@example.org" for who in ("AUTHOR", "COMMITTER")}
    safe = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
    variables = {**os.environ, **names, **mails, **safe, "GIT_CONFIG_GLOBAL": os.devnull}

    def run(folder, *words):
        command = ["git", "-C", folder, *words]
        return subprocess.run(
            command, env=variables, check=True, capture_output=True, text=True
        ).stdout

    run.variables = variables
    return run


@pytest.fixture
def upstream(tmp_path, git):
    folder = tmp_path / "upstream"
    for name in (LESSON, OTHER, LAB, ".gitignore"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    git(tmp_path, "init", "--quiet", "--initial-branch=main", folder)
    commit(git, folder)
    return folder


def commit(git, folder, message="a change"):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", f"--message={message}")


@pytest.fixture
def start(tmp_path, upstream, git):
    """start() -> (status, log): runs the hook of values.yaml, as a seat does; has `start.copy`."""
    course, home = tmp_path / "course", tmp_path / "home"
    (course / "docs" / "class").mkdir(parents=True)
    (course / ".venv").mkdir()
    home.mkdir()
    shutil.copy(DOCS / "pull.sh", course / "docs" / "class")
    *shell, hook = SEAT["lifecycleHooks"]["postStart"]["exec"]["command"]
    hook = hook.replace("https://git.example.org/kintsugi.git", f"file://{upstream}")
    hook = hook.replace("/opt/kintsugi", str(course))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run():
        variables = {**git.variables, "HOME": str(home), "PATH": path}
        done = subprocess.run([*shell, hook], env=variables, timeout=120)
        return done.returncode, (home / ".pull.log").read_text()

    run.copy = home / "kintsugi"
    return run


def edited(path: Path, change) -> list[str]:
    """The sources of a notebook after change(its cells)."""
    notebook = nbformat.read(path, 4)
    change(notebook.cells)
    nbformat.write(notebook, path)
    return sources(path)


def sources(path: Path) -> list[str]:
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    return [cell.source for cell in notebook.cells]


def test_the_first_start_clones(start, upstream):
    status, log = start()
    assert status == 0, log
    assert sources(start.copy / LESSON) == sources(upstream / LESSON)
    # lessons use .venv/bin/python
    assert (start.copy / ".venv").resolve() == start.copy.parents[1] / "course" / ".venv"


def test_what_is_new_comes_and_what_the_learner_wrote_stays(start, upstream, git):
    start()

    def learns(cells):
        cells[1].source = "my own words"
        next(cell for cell in cells if cell.cell_type == "code").outputs = []
        cells.append(nbformat.v4.new_code_cell("mine = 1"))

    def corrects(cells):
        cells[1].source = "their words"
        cells[len(cells) // 2].source = "a correction"

    mine = edited(start.copy / LESSON, learns)
    for name in (LAB, "notebooks/own.ipynb", "notebooks/later.ipynb"):
        (start.copy / name).write_text("mine")
    middle = len(edited(upstream / LESSON, corrects)) // 2
    other = edited(upstream / OTHER, corrects)
    for name in (LAB, "notebooks/later.ipynb"):
        (upstream / name).write_text("theirs")
    commit(git, upstream)

    status, log = start()
    assert status == 0, log
    mine[middle] = "a correction"
    assert sources(start.copy / LESSON) == mine
    assert sources(start.copy / OTHER) == other
    assert (start.copy / LAB).read_text() == "mine"
    assert (start.copy / "notebooks" / "own.ipynb").read_text() == "mine"
    # a file that is new on both sides: the learner's is renamed
    (aside,) = start.copy.glob("notebooks/later__*.ipynb")
    assert aside.read_text() == "mine"
    assert (start.copy / "notebooks" / "later.ipynb").read_text() == "theirs"

    again, log = start()
    assert again == 0 and sources(start.copy / LESSON) == mine, log


def test_what_was_removed_stays_with_who_has_changed_it(start, upstream, git):
    start()
    (start.copy / LAB).write_text("mine")
    (start.copy / LESSON).unlink()  # is restored
    (upstream / LAB).unlink()
    (upstream / OTHER).unlink()
    commit(git, upstream)
    status, log = start()
    assert status == 0, log
    assert (start.copy / LAB).read_text() == "mine"
    assert not (start.copy / OTHER).exists()
    assert sources(start.copy / LESSON) == sources(upstream / LESSON)


def test_no_notebook_is_broken_by_lines_of_two(start, upstream, git, tmp_path):
    """The learner's copy changes a cell's outputs; upstream the cell becomes Markdown."""
    start()
    before = tmp_path / "before.ipynb"
    shutil.copy(start.copy / LESSON, before)

    def printing(cells):
        prints = (c for c in cells if any(o.output_type == "stream" for o in c.get("outputs", [])))
        return next(prints)

    def learns(cells):
        printing(cells).outputs = [nbformat.v4.new_output("stream", text="what I have seen\n")]

    def becomes_text(cells):
        cell = printing(cells)
        cells[cells.index(cell)] = nbformat.v4.new_markdown_cell(cell.source, id=cell.id)

    edited(start.copy / LESSON, learns)
    mine = (start.copy / LESSON).read_text()
    edited(upstream / LESSON, becomes_text)
    commit(git, upstream)
    words = "merge-file", "--ours", "-p", start.copy / LESSON, before, upstream / LESSON
    with pytest.raises(nbformat.ValidationError):
        nbformat.validate(nbformat.reads(git(tmp_path, *words), 4))

    status, log = start()
    assert status == 0, log
    assert (start.copy / LESSON).read_text() == mine
    assert list(start.copy.glob("**/*.mine")) == []


def test_a_seat_starts_without_a_network(start, upstream):
    start()
    (start.copy / LAB).write_text("mine")
    upstream.rename(upstream.with_name("away"))
    status, log = start()
    assert status == 0 and "not brought up to date" in log
    assert (start.copy / LAB).read_text() == "mine"


def test_a_seat_without_a_copy_does_not_start(start, upstream):
    """Kubernetes ends a container whose hook fails, and tells the learner."""
    upstream.rename(upstream.with_name("away"))
    status, _ = start()
    assert status != 0 and not start.copy.exists()
    # an interrupted clone leaves a partial copy
    start.copy.with_name("kintsugi.partial").mkdir()
    upstream.with_name("away").rename(upstream)
    assert start()[0] == 0 and (start.copy / LAB).is_file()


def test_other_histories_take_nothing_from_a_learner(start, upstream, git):
    start()
    (start.copy / LAB).write_text("mine")
    shutil.rmtree(upstream / ".git")  # a new repository shares no commit with the copy
    git(upstream.parent, "init", "--quiet", "--initial-branch=main", upstream)
    commit(git, upstream, "another")  # the same message in the same second gives the same hash
    status, log = start()
    assert status == 0 and "not brought up to date" in log
    assert (start.copy / LAB).read_text() == "mine"
    shutil.rmtree(start.copy / ".git")  # and now the learner's
    assert start()[0] == 0 and (start.copy / LAB).read_text() == "mine"


# --- the page -------------------------------------------------------------------------------------


def test_the_page_says_what_the_files_say():
    page = (DOCS / "kubernetes.md").read_text()
    assert list(notebook_rules.broken_links(page, DOCS / "kubernetes.md")) == []
    for text in (page, (DOCS / "values.yaml").read_text()):
        assert re.findall(r"--version (\S+)", text) == ["4.4.0"]
    build = "git archive HEAD | docker build -f docs/class/Dockerfile"
    assert build in page and build in (DOCS / "Dockerfile").read_text()
