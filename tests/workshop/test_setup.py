"""`make setup` from scratch, interrupted, broken, offline: it repairs itself or says what to do.

It really sets up a workshop of three tiny packages: a virtual environment, pip, wheels made here.
"""

import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience
from utils.paths import ROOT
from utils.workshop import setup
from utils.workshop.pip import SetupError, explain

BACKEND = """
import os, time
def build_editable(folder, config_settings=None, metadata_directory=None):
    from make_wheel import make_wheel
    time.sleep(float(os.environ.get("SLOW", "0")))
    return make_wheel(folder, "kintsugi", "0.1.0")
"""
MAKE_WHEEL = """
import zipfile
def make_wheel(folder, name, version):
    file = f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(f"{folder}/{file}", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        who = f"Name: {name}\\nVersion: {version}\\n"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\n" + who)
        what = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr(f"{info}/WHEEL", what)
        wheel.writestr(f"{info}/RECORD", "")
    return file
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "kintsugi"
version = "0.1.0"
"""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A repository whose dependencies are torch and one small package."""
    root = tmp_path_factory.mktemp("setup") / "workshop"
    tools = root / "utils" / "workshop"
    tools.mkdir(parents=True)
    for name in ("__init__.py", "setup.py", "pip.py", "find_python.sh"):
        shutil.copy(ROOT / "utils" / "workshop" / name, tools)
    shutil.copy(ROOT / "Makefile", root)
    (root / "utils" / "__init__.py").touch()
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "backend.py").write_text(BACKEND)
    (root / "make_wheel.py").write_text(MAKE_WHEEL)
    (root / "requirements.txt").write_text("torch==2.13.0\nsmall==1.0\n")
    (root / "wheels").mkdir()
    namespace = {}
    exec(MAKE_WHEEL, namespace)
    namespace["make_wheel"](root / "wheels", "torch", "2.13.0+cpu")
    namespace["make_wheel"](root / "wheels", "small", "1.0")
    namespace["make_wheel"](root / "wheels", "triton", "1.0")
    return root


UNWANTED = ("PIP_", "MAKE", "MFLAGS")  # the user's pip, and the make that runs this test


def environment(root, **more):
    """An environment with the folder of wheels as the only index."""
    mine = {name: text for name, text in os.environ.items() if not name.startswith(UNWANTED)}
    nowhere = "http://127.0.0.1:9"
    mine |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1"}
    mine |= {"PIP_FIND_LINKS": str(root / "wheels"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    mine |= {"TORCH": "cpu", "HTTPS_PROXY": nowhere, "https_proxy": nowhere}
    mine |= {"PYTHON": os.path.realpath(sys._base_executable)}
    return mine | more


def make_setup(root, **more):
    return subprocess.run(
        ["make", "setup"],
        cwd=root,
        env=environment(root, **more),
        capture_output=True,
        text=True,
        timeout=patience(120),
    )


def versions(root):
    code = "import importlib.metadata as m; print(*map(m.version, ['torch', 'small', 'kintsugi']))"
    python = root / ".venv" / "bin" / "python"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.split()


def test_an_interrupted_setup_goes_on_and_a_second_does_nothing(workshop):
    first = subprocess.Popen(
        [sys._base_executable, "utils/workshop/setup.py"],
        cwd=workshop,
        env=environment(workshop, SLOW=str(patience(5))),  # not done before the signal
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in first.stdout:
        if line.startswith("   torch (CPU build):"):
            break
    first.send_signal(signal.SIGTERM)
    assert "the next call continues" in first.stdout.read()
    assert first.wait(patience(20)) == 1

    second = make_setup(workshop)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "packages:" in second.stdout and "torch (CPU build)" not in second.stdout
    assert versions(workshop) == ["2.13.0+cpu", "1.0", "0.1.0"]

    third = subprocess.Popen(
        ["make", "setup"], cwd=workshop, env=environment(workshop), stdout=subprocess.PIPE
    )
    assert third.stdout.read() == b"The workshop is set up. Next: make lab\n"
    _, third.returncode, used = os.wait4(third.pid, 0)
    assert third.returncode == 0
    # About 0.15 s of processor time, which, unlike wall time, hardly depends on the load.
    assert used.ru_utime + used.ru_stime < 0.5


def test_a_changed_list_is_installed(workshop):
    (workshop / "requirements.txt").write_text("torch==2.13.0\nsmall==1.0\nmissing==3.0\n")
    failed = make_setup(workshop)
    assert failed.returncode and "The package index has no missing==3.0" in failed.stderr
    (workshop / "requirements.txt").write_text("torch==2.13.0\nsmall==1.0\n")
    assert make_setup(workshop).returncode == 0


def test_the_triton_language_is_left_out_until_it_is_wanted(workshop):
    def installed():
        code = "import importlib.util as u; print(bool(u.find_spec('triton')))"
        python = workshop / ".venv" / "bin" / "python"
        return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()

    assert "TRITON=maybe is unknown" in make_setup(workshop, TRITON="maybe").stderr
    (workshop / "requirements.txt").write_text("torch==2.13.0\nsmall==1.0\ntriton==1.0\n")
    for words in ({"TRITON": "no"}, {}):  # the choice is remembered
        done = make_setup(workshop, **words)
        assert done.returncode == 0 and installed() == "False", done.stderr
    assert done.stdout == "The workshop is set up. Next: make lab\n"
    (workshop / "requirements.txt").write_text("torch==2.13.0\ntriton==1.0\nsmall==1.0\n")
    assert "Without triton, as TRITON=no asks" in make_setup(workshop).stdout
    assert make_setup(workshop, TRITON="yes").returncode == 0 and installed() == "True"
    (workshop / "requirements.txt").write_text("torch==2.13.0\nsmall==1.0\n")
    assert make_setup(workshop).returncode == 0


def test_a_broken_environment_is_made_anew(workshop):
    for name in (workshop / ".venv" / "bin").glob("python*"):
        name.unlink()
    mended = make_setup(workshop)
    assert "Repairing .venv" in mended.stdout and mended.returncode == 0, mended.stderr
    assert versions(workshop) == ["2.13.0+cpu", "1.0", "0.1.0"]


def test_a_moved_environment_is_made_anew_with_its_own_torch(workshop):
    moved = workshop.rename(workshop.with_name("moved"))
    done = make_setup(moved)
    assert ".venv was moved" in done.stdout and "torch (CPU build)" in done.stdout, done.stderr
    assert versions(moved) == ["2.13.0+cpu", "1.0", "0.1.0"]
    moved.rename(workshop)


def test_no_build_of_torch_and_no_network_are_told_apart(workshop):
    stamp = workshop / ".venv" / "kintsugi.json"
    python = workshop / ".venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "uninstall", "-qy", "torch"], check=True)
    stamp.write_text("{}")
    failed = make_setup(workshop, PIP_FIND_LINKS=str(workshop / "utils"))
    assert "make setup TORCH=cuda" in failed.stderr
    offline = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    failed = make_setup(workshop, PIP_FIND_LINKS="", PIP_TIMEOUT="2", **offline)
    assert "index cannot be reached" in failed.stderr and failed.stderr.count("\n") <= 2


@pytest.mark.parametrize(
    "machine, words",
    [
        (((3, 13), "Linux", "x86_64"), "Python 3.13; the workshop needs 3.11 or 3.12"),
        (((3, 9), "Darwin", "arm64"), "Python 3.9; the workshop needs"),
        (((3, 11), "Darwin", "x86_64"), "Darwin on x86_64 is not supported"),
        (((3, 12), "Darwin", "arm64", "13.6"), "macOS 13.6; torch needs 14"),
        (((3, 12), "Windows", "AMD64"), "use WSL"),
    ],
)
def test_an_unsuitable_machine_is_named(machine, words):
    with pytest.raises(SetupError, match=words):
        setup.check_machine(*machine)


def test_a_suitable_machine_passes():
    setup.check_machine((3, 11), "Linux", "x86_64")
    setup.check_machine((3, 12), "Darwin", "arm64", "14.0")


def test_an_old_linux_goes_without_the_server(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(setup, "VENV", str(tmp_path))
    monkeypatch.setattr(setup.platform, "machine", lambda: "x86_64")
    lock = (ROOT / "requirements.txt").read_text().splitlines()
    for enough in ("2.35", "2.41", "3.0", ""):
        assert setup.requirements(enough) == str(ROOT / "requirements.txt")
    for old in ("2.34", "2.28", "2.5"):
        shorter = Path(setup.requirements(old)).read_text().splitlines()
        assert [line.split("==")[0] for line in lock if line not in shorter] == ["nvidia-pytriton"]
        assert f"this system has {old}" in capsys.readouterr().out


def test_a_full_disk_is_named_before_and_after(tmp_path):
    setup.check_disk(tmp_path, 0.001)
    with pytest.raises(SetupError, match="set-up needs 1000000: free some space"):
        setup.check_disk(tmp_path, 1_000_000)
    assert "disk is full" in explain("packages", "OSError: [Errno 28] No space left", "log")


def test_an_unknown_failure_names_the_log():
    words = explain("packages", "building\nerror: command 'g++' failed\n", "the.log")
    assert words.startswith("packages failed (error: command 'g++' failed)") and "the.log" in words


def test_an_unknown_torch_is_refused(monkeypatch):
    monkeypatch.setenv("TORCH", "gpu")
    with pytest.raises(SetupError, match="TORCH=gpu is unknown"):
        setup.torch_kind()


@pytest.mark.parametrize(
    "version, kind",
    [("90010", "rocm"), ("90402", "rocm"), ("110501", "cpu")],  # MI250X, MI300X, a laptop
)
def test_an_instinct_gpu_gets_rocm(tmp_path, monkeypatch, capsys, version, kind):
    for node, target in enumerate(("0", version)):  # node 0 is the CPU
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(
            f"simd_count 440\ngfx_target_version {target}\nvendor_id 4098\n"
        )
    (tmp_path / "2" / "properties").mkdir(parents=True)  # a GPU that is hidden from a container
    monkeypatch.setattr(setup, "KFD", f"{tmp_path}/*/properties")
    monkeypatch.setattr(setup, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(setup.platform, "system", lambda: "Linux")
    monkeypatch.delenv("TORCH", raising=False)
    assert setup.torch_kind() == kind
    monkeypatch.setattr(setup, "has_nvidia_gpu", lambda: True)
    for wanted in ("", "rocm", "cpu"):
        monkeypatch.setenv("TORCH", wanted)
        assert setup.torch_kind() == (wanted or "cuda")


def test_rocm_torch_comes_from_its_index_with_its_own_triton(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "VENV", str(tmp_path))
    monkeypatch.setattr(setup, "reachable", lambda url: url.startswith("https://"))
    index = "https://download.pytorch.org/whl/rocm7.2"
    wanted = ["torch==2.13.0+rocm7.2", "--extra-index-url", index]
    assert setup.torch_arguments("rocm", "torch==2.13.0") == wanted
    monkeypatch.setattr(setup, "reachable", lambda url: False)
    assert setup.torch_arguments("rocm", "torch==2.13.0") == wanted[:1]
    assert setup.torch_arguments("cuda", "torch==2.13.0") == ["torch==2.13.0"]
    lock = (ROOT / "requirements.txt").read_text().splitlines()
    shorter = Path(setup.requirements("2.41", torch="rocm")).read_text().splitlines()
    assert [line.split("==")[0] for line in lock if line not in shorter] == ["triton"]


def test_the_page_on_amd_shows_what_hipify_makes(tmp_path):
    from torch.utils.hipify import hipify_python

    page = (ROOT / "docs" / "amd.md").read_text()
    cuda, shown = (re.search(rf"```{kind}\n(.*?)```", page, re.S)[1] for kind in ("cuda", "diff"))
    (tmp_path / "average.cu").write_text(cuda)
    (made,) = hipify_python.hipify(
        str(tmp_path), output_directory=f"{tmp_path}-amd", is_pytorch_extension=True
    ).values()
    lines = cuda.splitlines(), Path(made.hipified_path).read_text().splitlines()
    changes = list(difflib.unified_diff(*lines, n=0, lineterm=""))[2:]
    assert [line for line in changes if not line.startswith("@@")] == shown.splitlines()


# --- the choice of Python -------------------------------------------------------------------------


def find_python(folder, pythons, **more):
    """Run find_python.sh where only these commands exist: {name: version as a tuple, or None}."""
    for name, version in pythons.items():
        code = "exit 127"
        if version:
            pretend = f"import sys; sys.version_info = {version!r}; exec(sys.argv[1])"
            code = f'exec {sys.executable} -c "{pretend}" "$2"'
        (folder / name).write_text(f"#!/bin/sh\n{code}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["/bin/sh", ROOT / "utils" / "workshop" / "find_python.sh"],
        cwd=folder,
        env={"PATH": str(folder), **more},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "pythons, chosen",
    [
        ({"python3.11": (3, 11), "python3.12": (3, 12)}, "python3.11"),
        ({"python3.11": None, "python3.12": (3, 12)}, "python3.12"),  # a shim that fails
        ({"python3.12": None, "python3": (3, 11)}, "python3"),
        ({"python3": (3, 13)}, "python3"),  # set-up says what is wrong
        ({"python": (3, 12)}, "python"),
    ],
)
def test_the_first_python_that_runs_is_chosen(tmp_path, pythons, chosen):
    assert find_python(tmp_path, pythons).stdout == chosen + "\n"


def test_no_python_is_one_sentence(tmp_path):
    done = find_python(tmp_path, {"python": (2, 7)})
    assert done.returncode == 1 and "install Python 3.11 or 3.12" in done.stderr
    done = find_python(tmp_path, {"python3": (3, 11)}, PYTHON="nowhere/python")
    assert done.returncode == 1 and "PYTHON=nowhere/python does not run" in done.stderr
