"""Make the workshop's environment in .venv: `make setup`.

Runs with the system's Python and its standard library only. Each step is done once; an interrupted
set-up continues where it stopped. Torch comes first and separately, because the right build depends
on the machine: on Linux without a GPU the CPU build (0.2 GB), with an NVIDIA GPU the build that
includes CUDA (3 GB), with an AMD Instinct the one for ROCm. `TORCH=cpu`, `TORCH=cuda` and
`TORCH=rocm` choose it by hand. A torch of the right version that is already in .venv (your own
build, for example) is kept. `TRITON=no` leaves out the Triton language (0.7 GB on Linux; torch's
builds for GPUs include it anyway), `TRITON=yes` adds it again.
"""

import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VENV = os.path.join(ROOT, ".venv")
sys.path.insert(0, ROOT)

from utils.workshop.pip import Pip, SetupError, say  # noqa: E402

PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "kintsugi.json")  # what was set up; empty until set-up has finished
INDEX = "https://download.pytorch.org/whl/"
LOCAL = {"cpu": "cpu", "rocm": "rocm7.2"}  # builds with their own index: torch==2.13.0+cpu
BUILDS = {"cpu": "CPU", "cuda": "CUDA", "rocm": "ROCm"}
KFD = "/sys/class/kfd/kfd/topology/nodes/*/properties"  # Linux's list of AMD's GPUs
INSTINCT = {"90010", "90402", "90500"}  # gfx90a, gfx942, gfx950; a laptop's GPU does not count
SERVER_LIBC = "2.35"  # that nvidia-pytriton was built for
DISK_GB = {"cpu": 5, "cuda": 12, "rocm": 25, "plain": 4, "installed": 1}  # rocm: not measured


# --- requirements of the machine ------------------------------------------------------------------


def check_machine(version: tuple, system: str, cpu: str, macos: str = "") -> None:
    """Raise SetupError unless the workshop runs on this Python, operating system and processor."""
    if not (3, 11) <= version < (3, 13):
        raise SetupError(
            f"This is Python {version[0]}.{version[1]}; the workshop needs 3.11 or 3.12: install "
            "one of them, or name it with make PYTHON=/path/to/python3.11."
        )
    supported = {("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")}
    if (system, cpu) not in supported:
        raise SetupError(
            f"{system} on {cpu} is not supported, because torch has no build for it: use Linux "
            "(x86-64 or ARM) or a Mac with Apple silicon; on Windows use WSL."
        )
    if macos and int(macos.split(".")[0]) < 14:
        raise SetupError(f"This is macOS {macos}; torch needs 14: update macOS.")


def old_libc(found: str, needed: str) -> bool:
    """Whether this is a Linux with a GNU C library older than `needed`; both are like "2.35"."""

    def numbers(version):
        return [int(part) for part in version.split(".")[:2]]

    return bool(found) and numbers(found) < numbers(needed)


def requirements(libc: str, triton: str = "yes", torch: str = "") -> str:
    """The list to install: the lock, without the server on a Linux that is too old for it, and
    without the Triton language if it is not wanted or torch has installed AMD's."""
    lock, left_out = os.path.join(ROOT, "requirements.txt"), []
    if platform.machine() == "x86_64" and old_libc(libc, SERVER_LIBC):
        say(f"   Without nvidia-pytriton: it needs glibc {SERVER_LIBC}; this system has {libc}.")
        say("   Only the deploy lesson's own server is missing.")
        left_out.append("nvidia-pytriton==")
    if torch == "rocm":  # triton-rocm is another package with the same folder
        left_out.append("triton==")
    elif triton == "no":
        say("   Without triton, as TRITON=no asks: lesson 12 needs it; make setup TRITON=yes.")
        left_out.append("triton==")
    if not left_out:
        return lock
    with open(lock) as file:
        kept = [line for line in file if not line.startswith(tuple(left_out))]
    shorter = os.path.join(VENV, "requirements.txt")
    with open(shorter, "w") as file:
        file.writelines(kept)
    return shorter


def check_disk(folder: str, needed_gb: float) -> None:
    """Raise SetupError unless `needed_gb` GB are free where `folder` is."""
    free = shutil.disk_usage(folder).free / 1e9
    if free < needed_gb:
        raise SetupError(
            f"{free:.1f} GB are free in {folder}; set-up needs {needed_gb}: free some space, or "
            "clone the workshop to a larger disk."
        )


def check_venv_module() -> None:
    """Raise SetupError unless this Python can make virtual environments with pip."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        version = "{}.{}".format(*sys.version_info)
        raise SetupError(
            f"This Python {version} cannot make virtual environments: install its venv module "
            f"(Debian, Ubuntu: apt-get install python{version}-venv)."
        ) from None


# --- which torch ----------------------------------------------------------------------------------


def has_nvidia_gpu() -> bool:
    """Whether the machine has an NVIDIA driver and at least one device."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20
        )
        return done.returncode == 0 and b"GPU" in done.stdout
    except (OSError, subprocess.TimeoutExpired):
        return False


def has_amd_gpu() -> bool:
    """Whether the machine has AMD's driver and at least one Instinct GPU, MI200 or newer."""
    for path in glob.glob(KFD):
        try:
            with open(path) as file:
                found = re.search(r"^gfx_target_version (\d+)$", file.read(), re.M)
        except OSError:  # a container without this GPU sees the file but may not read it
            continue
        if found and found[1] in INSTINCT:
            return True
    return False


def torch_kind() -> str:
    """The torch to install: one of `BUILDS` on Linux, "plain" on macOS, with its single build."""
    wanted = os.environ.get("TORCH", "")
    if wanted and wanted not in BUILDS:
        raise SetupError(f"TORCH={wanted} is unknown: use TORCH=cpu, TORCH=cuda or TORCH=rocm.")
    if platform.system() != "Linux":
        return "plain"
    return wanted or ("cuda" if has_nvidia_gpu() else "rocm" if has_amd_gpu() else "cpu")


def torch_changes() -> bool:
    """Whether TORCH= asks for a different build from the one that set-up installed."""
    wanted = os.environ.get("TORCH", "")
    return bool(wanted) and read_stamp().get("torch", wanted) not in (wanted, "plain")


def wanted_triton() -> str:
    """Whether the Triton language is wanted, "yes" or "no": TRITON=, or the last choice."""
    wanted = os.environ.get("TRITON", "") or read_stamp().get("triton", "yes")
    if wanted not in ("yes", "no"):
        raise SetupError(f"TRITON={wanted} is unknown: use TRITON=yes or TRITON=no.")
    return wanted


def triton_changes() -> bool:
    """Whether TRITON= differs from the last set-up."""
    return wanted_triton() != read_stamp().get("triton", "yes")


def reachable(url: str, seconds: float = 4) -> bool:
    """Whether `url` answers in time (including the time of a silent name server)."""
    import threading  # these two cost 0.1 s, which a finished set-up need not pay
    import urllib.request

    answers = []

    def ask():
        try:
            request = urllib.request.Request(url, method="HEAD")
            urllib.request.urlopen(request, timeout=seconds)
            answers.append(True)
        except Exception:
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers)


def torch_arguments(kind: str, pin: str) -> list:
    """The arguments of `pip install` for torch: `pin` is its line in the lock, torch==2.13.0."""
    if kind not in LOCAL:
        return [pin]
    pin, index = f"{pin}+{LOCAL[kind]}", INDEX + LOCAL[kind]
    if reachable(index + "/torch/"):
        return [pin, "--extra-index-url", index]
    say(f"   {index} cannot be reached; looking for {pin} in pip's own sources.")
    return [pin]


# --- the steps ------------------------------------------------------------------------------------


def fingerprint() -> str:
    """The environment's inputs: changed inputs or a moved folder require a new set-up."""
    digest = hashlib.sha256(ROOT.encode())
    with open(os.path.join(ROOT, "requirements.txt"), "rb") as file:
        digest.update(file.read())
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        digest.update(file.read().split(b"[tool.ruff]")[0])  # the settings of tools do not count
    return digest.hexdigest()


def read_stamp() -> dict:
    try:
        with open(STAMP) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def write_stamp(**news: str) -> None:
    """Add `news` to the stamp."""
    news = {**read_stamp(), **news}
    with open(STAMP + ".tmp", "w") as file:
        json.dump(news, file)
    os.replace(STAMP + ".tmp", STAMP)


def ready() -> bool:
    """Whether nothing is left to do (fast: it only starts .venv's own Python)."""
    done = read_stamp().get("fingerprint") == fingerprint()
    return done and not torch_changes() and not triton_changes() and venv_state() == "good"


def venv_state() -> str:
    """One of "missing", "broken" (Python or pip does not run), "wrong" (version), "good"."""
    if not os.path.exists(os.path.join(VENV, "pyvenv.cfg")):
        return "missing"
    test = "import sys, importlib.util as u; print(*sys.version_info[:2], bool(u.find_spec('pip')))"
    try:
        done = subprocess.run([PYTHON, "-I", "-c", test], stdout=subprocess.PIPE, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "broken"
    words = done.stdout.decode().split()
    if done.returncode or words[2:] != ["True"]:
        return "broken"
    return "good" if words[:2] in (["3", "11"], ["3", "12"]) else "wrong"


def make_venv(pip: Pip) -> None:
    """Make .venv; make it again if it is ours and is broken or was moved."""
    state = venv_state()
    moved = read_stamp().get("root", ROOT) != ROOT
    if state == "good" and not moved:
        return
    ours = os.path.exists(STAMP)
    if state != "missing" and not ours:
        raise SetupError(f"{VENV} is {state} and was not made here: remove it (rm -r .venv).")
    if state != "missing":
        say("   .venv was moved; making it again." if moved else "   Repairing .venv.")
    check_venv_module()
    if ours:
        shutil.rmtree(VENV)
    os.makedirs(VENV, exist_ok=True)
    write_stamp(root=ROOT)
    # Not sys.executable: that may be the .venv that was just removed.
    pip.run("virtual environment", [sys._base_executable, "-m", "venv", VENV])


def torch_pin() -> str:
    """The lock's line for torch."""
    with open(os.path.join(ROOT, "requirements.txt")) as file:
        return next(line.strip() for line in file if line.startswith("torch=="))


def installed_torch() -> "str | None":
    """The public version of torch in .venv (2.13.0 for 2.13.0+cpu), or None."""
    code = "import importlib.metadata as m; print(m.version('torch').split('+')[0])"
    done = subprocess.run(
        [PYTHON, "-I", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return done.stdout.decode().strip() if done.returncode == 0 else None


def set_up() -> None:
    """Do the missing steps in order."""
    system, macos = platform.system(), platform.mac_ver()[0]
    check_machine(sys.version_info[:2], system, platform.machine(), macos)
    triton = wanted_triton()  # before a new .venv forgets it
    pip = Pip(ROOT, PYTHON, log=os.path.join(VENV, "setup.log"))
    say("Setting up the workshop in .venv (once, a few minutes).")
    make_venv(pip)
    same_torch = installed_torch() == torch_pin().split("==")[1]
    anew = same_torch and torch_changes()
    kind = "installed" if same_torch and not anew else torch_kind()
    check_disk(ROOT, DISK_GB[kind])
    if kind != "installed":
        build = f"torch ({BUILDS[kind]} build)" if kind in BUILDS else "torch"
        pip.install(build, *["--force-reinstall"] * anew, *torch_arguments(kind, torch_pin()))
        write_stamp(torch=kind)
    torch = read_stamp().get("torch", "")
    pip.install("packages", "-r", requirements(platform.libc_ver()[1], triton, torch))
    pip.install("the workshop itself", "--no-deps", "--no-build-isolation", "-e", ROOT)
    write_stamp(fingerprint=fingerprint(), triton=triton)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    signal.signal(signal.SIGTERM, interrupt)  # so that pip does not continue without us
    try:
        if not ready():
            folder = os.open(ROOT, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Another set-up is running here; waiting for it.")
                fcntl.flock(folder, fcntl.LOCK_EX)
            if not ready():
                set_up()
        if read_stamp().get("torch") == "cpu":
            nvidia = os.path.exists("/dev/nvidiactl")
            if better := "cuda" if nvidia else "rocm" if has_amd_gpu() else "":
                say("This machine has a GPU, but torch is the CPU build: "
                    f"make setup TORCH={better} installs the other.")
        if "--quiet" not in sys.argv:
            say("The workshop is set up. Next: make lab")
    except SetupError as error:
        sys.exit(f"Set-up stopped. {error}")
    except PermissionError as error:
        sys.exit(f"Set-up stopped. {error.filename} cannot be written: clone into your own folder.")
    except OSError as error:
        sys.exit(f"Set-up stopped. {error}: fix that and call again.")
    except KeyboardInterrupt:
        sys.exit("\nSet-up was interrupted; the next call continues where it stopped.")


if __name__ == "__main__":
    main()
