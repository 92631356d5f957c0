"""The parts of a seat, without a hub: sandbox (bubblewrap), limits (control groups) and the copy of
the course (git)."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.classroom.boards import until
from tests.hub.hubs import CAN_LIMIT, GIT, need_seats
from tests.patience import patience
from tests.small_disk import small_disk
from utils.hub import seat
from utils.hub.limits import OWN, PERIOD, TREES, Limits, LimitsError
from utils.paths import ROOT

pytestmark = pytest.mark.thorough


@pytest.fixture
def home(tmp_path):
    need_seats()
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def inside(home, *words, more=(), memory=None, **options):
    """Run words in a seat; returns the completed process."""
    wall = seat.sandbox(home, [], more, memory=memory)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(seat.HOME), "SECRET": "seen"}
    return subprocess.run(
        [*wall, *words], capture_output=True, text=True, timeout=patience(60), env=environment,
        **options,
    )


# --- the sandbox ----------------------------------------------------------------------------------


def test_only_the_home_stays(home):
    done = inside(home, "sh", "-c", "echo mine > file; echo x > /tmp/y; echo x > /dev/shm/z; pwd")
    assert (done.stdout, done.returncode) == (f"{seat.HOME}\n", 0), done.stderr
    assert (home / "file").read_text() == "mine\n"
    assert not Path("/tmp/y").exists() and not Path("/dev/shm/z").exists()
    assert inside(home, "ls", "/tmp", "/dev/shm", "/home").stdout.split() == [
        "/dev/shm:", "/home:", "learner", "/tmp:",
    ]


def test_nothing_else_of_the_machine_is_seen(home, tmp_path):
    (tmp_path / "secret").write_text("secret")
    assert inside(home, "cat", str(tmp_path / "secret")).returncode != 0
    assert inside(home, "kill", "-0", str(os.getpid())).returncode != 0
    shown = inside(home, "sh", "-c", "cd /proc; ls -d [0-9]*").stdout.split()
    assert len(shown) <= 4  # its own; bubblewrap is the first
    assert inside(home, "hostname").stdout == "localhost\n"
    for place in (ROOT / "README.md", "/usr/bin/env", "/etc/passwd"):
        done = inside(home, "sh", "-c", f"echo x >> {place}")
        assert "Read-only file system" in done.stderr, place


def test_what_lies_in_a_readable_folder_can_be_hidden(home, tmp_path):
    """As with the hub's folder, which `make hub` makes in that of the course."""
    course, place = tmp_path / "course", tmp_path / "course" / "hub"
    for name in ("lesson", "hub/passwords", "hub/homes/bob/mine"):
        (course / name).parent.mkdir(parents=True, exist_ok=True)
        (course / name).write_text("secret")
    wall = seat.sandbox(place / "homes" / "bob", [], [(course, course)], hidden=[place])
    find = ["find", str(course), str(seat.HOME), "-type", "f"]
    done = subprocess.run([*wall, *find], capture_output=True, text=True)
    assert done.stdout.split() == [f"{course}/lesson", f"{seat.HOME}/mine"], done.stderr


# bubblewrap ends with its parent once it is set up: then its inner process waits for ours.
UP = 'until grep -q "^State:.S" /proc/1/status; do :; done; touch up; exec "$@"'


def test_a_seat_ends_with_who_started_it(home):
    sleep = ["sleep", f"61234.{os.getpid()}"]  # a unique argument
    words = [*seat.sandbox(home, []), "sh", "-c", UP, "sh", *sleep]
    starter = f"import subprocess; subprocess.Popen({words}); input()"
    parent = subprocess.Popen([sys.executable, "-c", starter], stdin=subprocess.PIPE)
    find = ["-f", " ".join(sleep)]
    try:
        until((home / "up").exists)
        parent.kill()
        parent.wait()
        until(lambda: not subprocess.run(["pgrep", *find], capture_output=True).stdout)
    finally:
        subprocess.run(["pkill", "-KILL", *find])


def test_it_says_what_the_machine_lacks(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(seat.SeatError, match=r"^bubblewrap is missing: apt-get install bubblewrap"):
        seat.check_sandbox()
    refusing = tmp_path / "bwrap"
    refusing.write_text(
        "#!/bin/sh\necho bwrap: setting up uid map: Permission denied >&2; exit 1\n"
    )
    refusing.chmod(0o755)
    with pytest.raises(seat.SeatError, match=r"uid map: Permission denied\): on Ubuntu 24\.04"):
        seat.check_sandbox()
    refusing.write_text("#!/bin/sh\necho bwrap: Unknown option --size >&2; exit 1\n")
    with pytest.raises(seat.SeatError, match=r"^bubblewrap is too old: it takes 0\.7 or newer"):
        seat.check_sandbox()


# --- limits ---------------------------------------------------------------------------------------


@pytest.fixture
def group():
    if not CAN_LIMIT:
        pytest.skip("only root may make control groups here")
    name = f"test-{os.getpid()}"
    made = Limits().group(name, memory=512 << 20, processes=40)
    yield made
    until(lambda: made.remove() or not any(folder.exists() for folder in made.folders.values()))


def test_memory_ends_who_takes_too_much(home, group):
    for mib, status in ((64, 0), (1024, -9)):
        take = [sys.executable, "-c", f"bytearray({mib} << 20)"]
        done = subprocess.run(take, preexec_fn=group.enter, timeout=patience(60))
        assert done.returncode == status, mib
    # Files in /tmp and /dev/shm are memory as well.
    for place in ("/tmp", "/dev/shm"):
        fill = f"head -c 1G /dev/zero > {place}/full"
        assert inside(home, "sh", "-c", fill, preexec_fn=group.enter).returncode != 0, place


def test_files_of_memory_leave_room_for_the_seat(home, group):
    """The group has 512 MiB: a program fills each file system and continues."""
    for place in ("/tmp", "/dev/shm"):
        fill = f"head -c 1G /dev/zero > {place}/full; stat -c %s {place}/full"
        done = inside(home, "sh", "-c", fill, preexec_fn=group.enter, memory=512 << 20)
        assert (done.stdout, done.returncode) == (f"{256 << 20}\n", 0), place
        assert "No space left on device" in done.stderr, place


def test_cores_hold_back_who_computes_too_much(group):
    Limits().group(f"test-{os.getpid()}", cores=0.1)  # the same group
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=group.enter)
    stat = group.folders["cpu"] / "cpu.stat"
    until(
        lambda: dict(line.split() for line in stat.read_text().splitlines())["nr_throttled"] > "0"
    )
    child.kill()
    child.wait()


def test_processes_are_counted(group):
    many = "import subprocess\nfor n in range(99): subprocess.Popen(['sleep', '9'], stderr=-3)"
    done = subprocess.run(
        ["timeout", "60", sys.executable, "-c", many], preexec_fn=group.enter, capture_output=True,
        text=True,
    )
    assert "Resource temporarily unavailable" in done.stderr
    for pid in (group.folders["pids"] / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(int(pid), 9)


def test_a_seat_is_shown_its_own_limits(home, group):
    see = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from utils.measure import machine as m; "
    see += "print(m.cores(), m.machine().memory >> 20)"
    Limits().group(f"test-{os.getpid()}", memory=2 << 30, cores=0.5)  # the same group
    more, python = group.mounts(), [sys.executable, "-c", see]
    done = inside(home, *python, more=more, preexec_fn=group.enter)
    assert done.stdout == "0.5 2048\n", done.stderr


def tree(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text().split()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_version_2_of_control_groups_is_told_the_same(tmp_path):
    """In an ordinary folder, which works under version 1 as well."""
    (tmp_path / "slice" / "hub.service").mkdir(parents=True)
    (tmp_path / "slice" / "hub.service" / "cgroup.procs").write_text(f"{os.getpid()}\n")
    limits = Limits(tmp_path, "0::/slice/hub.service\n")
    assert limits.version == 2
    limits.group("ada", memory=3 << 30, cores=1.5, processes=400)
    limits.group("bob")
    told, own = tree(tmp_path), "slice/hub.service"
    assert told[f"{own}/{OWN}/cgroup.procs"] == [str(os.getpid())]
    assert told[f"{own}/cgroup.subtree_control"] == ["+memory", "+cpu", "+pids"]
    assert told[f"{own}/seat-ada/memory.max"] == [str(3 << 30)]
    assert told[f"{own}/seat-ada/cpu.max"] == ["150000", str(PERIOD)]
    assert told[f"{own}/seat-ada/pids.max"] == ["400"]
    assert told[f"{own}/seat-ada/cpu.weight"] == ["10"]
    assert {told[f"{own}/seat-bob/{name}.max"][0] for name in ("memory", "cpu", "pids")} == {"max"}
    # By then the hub has moved down one level, and must find the same place.
    again = Limits(tmp_path, f"0::/slice/hub.service/{OWN}\n")
    assert again.folders == limits.folders
    group = again.group("ada")
    assert group.mounts() == [(tmp_path / own / "seat-ada", TREES)]
    group.enter()
    assert tree(tmp_path)[f"{own}/seat-ada/cgroup.procs"] == [str(os.getpid())]


def test_without_a_group_to_write_the_hub_says_how_to_get_one(tmp_path):
    (tmp_path / "hub.service").write_text("no folder")
    said = r"hub\.service\S* cannot be written .*Delegate=yes.*--no-limits"
    with pytest.raises(LimitsError, match=said):
        Limits(tmp_path, "0::/hub.service\n")


def test_a_kernel_that_refuses_a_value_is_named(tmp_path):
    """Such an error has no file name; a full disk stands in for the kernel."""
    with small_disk(tmp_path, 32 << 10) as disk:
        (disk / "hub.service" / OWN).mkdir(parents=True)
        (disk / "hub.service" / "cgroup.procs").touch()
        (disk / "hub.service" / "cgroup.subtree_control").touch()
        with contextlib.suppress(OSError):
            (disk / "rest").write_bytes(bytes(64 << 10))
        with pytest.raises(LimitsError, match=r"/hub\.service cannot be written \(No space left"):
            Limits(disk, "0::/hub.service\n")


# --- the copy of the course -----------------------------------------------------------------------


def git(folder, *words):
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    who = ["-c", "user.name=Instructor", "-c", "user.email=instructor@example.org"]
    subprocess.run(
        [*GIT, *who, "-C", str(folder), *words], check=True, env=environment, capture_output=True
    )


@pytest.fixture
def course(tmp_path):
    folder = tmp_path / "course"
    (folder / "labs").mkdir(parents=True)
    for name in ("lesson", "labs/answer"):
        (folder / name).write_text(f"{name}\n" * 3)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "The course")
    return folder


def start(home, course):
    """Run what a seat does before JupyterLab; returns the copy."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(seat.HOME),
        "GIT_CONFIG_SYSTEM": str(seat.GITCONFIG),
    }
    words = [*seat.sandbox(home, [], [(course, course)]), *seat.begin(course, "main"), "true"]
    subprocess.run(words, check=True, env=environment, timeout=patience(60))
    return home / seat.COPY.name


def test_a_copy_gets_what_is_new_and_keeps_what_is_the_learners(home, course):
    copy = start(home, course)
    (copy / "labs" / "answer").write_text("my answer\n")
    for name in ("labs/answer", "lesson"):
        (course / name).write_text("fixed\n")
    git(course, "commit", "-qam", "News")
    assert start(home, course) == copy
    assert (copy / "labs" / "answer").read_text() == "my answer\n"
    assert (copy / "lesson").read_text() == "fixed\n"


def test_a_seat_opens_when_the_course_cannot_be_read(home, course):
    copy = start(home, course)
    course.rename(course.with_name("moved"))
    course.mkdir()
    assert start(home, course) == copy and (copy / "lesson").exists()
    assert "was not brought up to date" in (home / "pull.log").read_text()
