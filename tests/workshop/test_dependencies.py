"""requirements.in, its lock requirements.txt and environment.yml agree on all machines."""

import importlib.metadata
import platform
import re

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from utils.paths import ROOT
from utils.workshop import setup
from utils.workshop.lock import CUDA_PACKAGE, applies, environments, reduce_to_supported


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def read(name):
    """The requirements in a file, without comments."""
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def machine(environment):
    return "{python_full_version}-{sys_platform}-{platform_machine}".format(**environment)


MACHINES = pytest.mark.parametrize("environment", list(environments()), ids=machine)


@MACHINES
def test_every_wish_has_exactly_one_pin(environment):
    pins = [pin for pin in read("requirements.txt") if applies(pin, environment)]
    for wish in read("requirements.in"):
        if applies(wish, environment):
            found = [pin for pin in pins if canonical(pin.name) == canonical(wish.name)]
            assert len(found) == 1, f"{wish} has {len(found)} pins in requirements.txt: make lock"
            version = str(found[0].specifier).removeprefix("==")
            assert wish.specifier.contains(version), f"{found[0]} is not {wish}: make lock"


@MACHINES
def test_no_package_is_pinned_twice(environment):
    names = [canonical(pin.name) for pin in read("requirements.txt") if applies(pin, environment)]
    assert len(names) > 100
    assert sorted(names) == sorted(set(names))


def test_the_lock_pins_exactly_and_names_no_place():
    text = (ROOT / "requirements.txt").read_text()
    assert "://" not in text and " @ " not in text and "--" not in text
    for pin in read("requirements.txt"):
        assert re.fullmatch(r"==[0-9][0-9a-z.!]*", str(pin.specifier)), f"{pin} is not one version"
        assert not CUDA_PACKAGE.match(pin.name), f"{pin}: torch itself pins its CUDA packages"


@pytest.mark.parametrize(
    "package, machines",
    [
        ("nvidia-pytriton", [("linux", "x86_64")]),
        ("torchft", [("linux", "x86_64")]),
        ("triton", [("linux", "x86_64"), ("linux", "aarch64")]),
    ],
)
def test_what_is_only_for_some_machines(package, machines):
    for name in ("requirements.in", "requirements.txt"):
        (line,) = (line for line in read(name) if line.name == package)
        holds = {
            (e["sys_platform"], e["platform_machine"]): applies(line, e) for e in environments()
        }
        assert [where for where, yes in holds.items() if yes] == machines


def test_torch_itself_pins_triton():
    """A different version could not be installed together with torch's CUDA build."""
    (wish,) = (line for line in read("requirements.in") if line.name == "triton")
    assert not wish.specifier
    (pin,) = (line for line in read("requirements.txt") if line.name == "triton")
    for text in importlib.metadata.requires("torch"):
        if (wanted := Requirement(text)).name == "triton":  # the CPU build does not name it
            assert wanted.specifier == pin.specifier


def test_conda_installs_the_same_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert [entry.split("=")[0] for entry in conda] == ["python", "pip"]
    python = next(entry for entry in conda if entry.startswith("python")).split("=")[1]
    assert python in {e["python_version"] for e in environments()}
    assert pip == {"pip": ["-r requirements.txt", "-e ."]}


def test_this_environment_is_the_lock():
    """A CPU build of torch (2.13.0+cpu) counts as torch 2.13.0. An old Linux has no pytriton, and
    the Triton language is optional."""
    wrong, left_out = [], []
    if setup.old_libc(platform.libc_ver()[1], setup.SERVER_LIBC):
        left_out.append("nvidia-pytriton")
    if setup.read_stamp().get("triton") == "no":
        left_out.append("triton")
    for pin in read("requirements.txt"):
        if pin.name in left_out:
            continue
        if pin.marker is None or pin.marker.evaluate():
            try:
                installed = importlib.metadata.version(pin.name)
            except importlib.metadata.PackageNotFoundError:
                installed = "missing"
            if installed == "missing" or not pin.specifier.contains(Version(installed).public):
                wrong.append(f"{pin} (installed: {installed})")
    assert not wrong, f"make setup fixes this: {wrong}"


def test_reducing_a_lock_to_our_machines():
    lines = [
        "triton==3.0 ; sys_platform == 'linux'",
        "nvidia-cublas==13.1",
        "nvidia-pytriton==0.7.0 ; sys_platform == 'linux'",
        "colorama==0.4.6 ; sys_platform == 'win32'",
        "pexpect==4.9.0 ; sys_platform != 'win32'",
        "old==1.0 ; python_full_version < '3.12'",
        "split==1 ; python_full_version < '3.12' or sys_platform == 'darwin'",
        "both==1 ; sys_platform == 'darwin' or sys_platform == 'linux'",
        "sh==2.4.0 ; python_full_version < '3.13' and platform_machine == 'x86_64'",
        "brotli[all]==1.0",
    ]
    assert reduce_to_supported(lines) == [
        'triton==3.0 ; sys_platform == "linux"',
        'nvidia-pytriton==0.7.0 ; sys_platform == "linux"',
        "pexpect==4.9.0",
        'old==1.0 ; python_full_version < "3.12"',
        'split==1 ; python_full_version < "3.12" or sys_platform == "darwin"',
        "both==1",
        'sh==2.4.0 ; platform_machine == "x86_64"',
        "brotli[all]==1.0",
    ]
