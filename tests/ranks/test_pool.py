"""Ranks in a notebook: results, variables, output, and everything that can go wrong."""

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

from tests.patience import patience
from tests.tiers import first
from utils.ranks import diagnosis
from utils.ranks import pool as pool_module
from utils.ranks.magic import open_pool, parse_line, parse_ranks
from utils.ranks.pool import Dead, RankError, Ranks, device

LIMIT = 3  # seconds for a collective: more than the skew of ranks on a busy machine
HUNG = f"did not complete within {LIMIT} s"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine, ranks take longer to end after one has failed."""
    monkeypatch.setattr(pool_module, "GRACE", patience(1))


@pytest.fixture(scope="module")
def pool():
    with Ranks(4) as ranks:
        yield ranks


def total_of_ranks(scale):
    t = torch.ones(3) * dist.get_rank() * scale
    dist.all_reduce(t)
    return t


def gone(pids, seconds=30):
    """Whether all these processes end within `seconds`; a zombie counts as ended."""
    deadline = time.monotonic() + patience(seconds)
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_run_gives_every_ranks_result(size):
    with Ranks(size) as ranks:
        results = ranks.run(total_of_ranks, 2.0)
        assert [r.tolist() for r in results] == [[2.0 * sum(range(size))] * 3] * size
        assert ranks.run(lambda: dist.get_rank()) == list(range(size))


def leave_without_the_others():
    if dist.get_rank() == 0:
        dist.destroy_process_group()
    else:
        dist.recv(torch.ones(1), src=0)


def test_who_lost_the_connection_is_named_where_nobody_failed(pool):
    with pytest.raises(RankError, match=r"^Ranks 1–3 lost the connection to the others:\nrank 0 "):
        pool.run(leave_without_the_others)
    assert pool.run(dist.get_rank) == [0, 1, 2, 3]


def test_cells_share_variables_and_seeds(pool):
    pool.cell("x = torch.rand(2)\ny = (rank, world_size, device.type, dist.get_backend())")
    pool.cell("x = 2 * x")
    first, *others = pool.get("x")
    assert all(torch.equal(first, x) for x in others)
    assert pool.get("y") == [(r, 4, "cpu", "gloo") for r in range(4)]
    pool.put(z=5)
    assert pool.get("z") == [5] * 4
    assert pool.run(torch.get_num_threads) == [1] * 4
    assert pool.run(device) == [torch.device("cpu")] * 4


def test_output_is_labelled_and_folded(pool, capsys):
    pool.cell("print('same')")
    pool.cell("print('rank', rank if rank == 2 else 'other')")
    pool.cell("rank * 2", on=[0, 2])
    pool.cell("'both'", on=[1, 3])
    pool.cell("rank;")
    assert capsys.readouterr().out == (
        "all ranks │ same\n"
        "ranks 0, 1, 3 │ rank other\n"
        "rank 2        │ rank 2\n"
        "rank 0 │ 0\n"
        "rank 2 │ 4\n"
        "ranks 1, 3 │ 'both'\n"
    )


@pytest.mark.parametrize(
    "ranks, size, text",
    [([0, 1, 2, 3], 4, "all ranks"), ([0], 1, "rank 0"), ([1], 4, "rank 1"),
     ([0, 1], 4, "ranks 0, 1"), ([0, 1, 2, 5], 8, "ranks 0–2, 5")],
)
def test_labels(ranks, size, text):
    assert diagnosis.label(ranks, size) == text


def test_an_exception_shows_that_ranks_own_line_once_and_ranks_stay_usable(pool):
    pids = pool.pids
    pool.cell("kept = rank")
    with pytest.raises(RankError) as error:
        pool.cell("t = 1\nif rank in (1, 3):\n    raise ValueError('bad luck')\nprint(t)")
    text = str(error.value)
    assert text.startswith("Ranks 1, 3 failed:\n")
    assert text.count("line 3: raise ValueError('bad luck')") == 1
    assert text.count("ValueError: bad luck") == 1
    assert "ranks/worker" not in text and "site-packages" not in text
    assert pool.pids == pids and pool.get("kept") == [0, 1, 2, 3]
    assert pool.run(total_of_ranks, 1)[0].tolist() == [6.0] * 3


def test_an_exception_frees_those_who_wait_for_that_rank(pool):
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        pool.cell("if rank == 1:\n    1 / 0\ndist.all_reduce(torch.ones(1))")
    assert time.monotonic() - start < 20  # the time limit of a collective is 30
    assert "Rank 1 failed" in str(error.value)
    assert "ranks 0, 2, 3 │ waiting in all_reduce" in str(error.value)
    assert "line 3: dist.all_reduce(torch.ones(1))" in str(error.value)
    assert pool.run(total_of_ranks, 1)[3].tolist() == [6.0] * 3


def test_exit_in_a_cell_is_an_error_not_the_end(pool):
    with pytest.raises(RankError, match="SystemExit"):
        pool.cell("raise SystemExit(1)")
    assert pool.run(os.getpid) == pool.pids


def test_a_syntax_error_names_the_line(pool):
    with pytest.raises(RankError, match=r"line 2: x \+\* 2\n.*SyntaxError: invalid syntax"):
        pool.cell("y = 1\nx +* 2")


def test_a_result_that_cannot_be_sent_is_said(pool):
    with pytest.raises(RankError, match="pickle"):
        pool.run(lambda: threading.Lock())


class TwoWords(Exception):
    """Can be pickled but not unpickled: pickle calls the class with a single argument."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_a_result_that_cannot_be_read_is_said_and_no_later_call_gets_it(pool):
    with pytest.raises(RankError, match="the result was sent but cannot be read: TypeError"):
        pool.run(lambda: TwoWords("a", "b") if dist.get_rank() == 0 else "OLD")
    assert pool.run(lambda: "NEW") == ["NEW"] * 4


def test_an_exception_without_a_text_is_said(pool):
    def fail():
        raise Unprintable

    with pytest.raises(RankError, match=r"Unprintable: \(its text is unavailable: RuntimeError\)"):
        pool.run(fail)


def test_after_a_second_interrupt_no_call_gets_an_old_result(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "PATIENCE", patience(20))

    def stubborn(folder):
        try:
            (folder / f"begun{dist.get_rank()}").touch()
            time.sleep(60)
        except KeyboardInterrupt:
            (folder / f"caught{dist.get_rank()}").touch()
            time.sleep(60)
        return "OLD"

    def interrupt_twice():
        for word in ("begun", "caught"):
            while len(list(tmp_path.glob(f"{word}*"))) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

    with Ranks(2) as ranks:
        pids = ranks.pids
        threading.Thread(target=interrupt_twice, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            ranks.run(stubborn, tmp_path)
        with pytest.raises(RankError, match="a second interrupt came"):
            ranks.run(lambda: "NEW")
        assert gone(pids)
        ranks.restart()
        assert ranks.run(lambda: "NEW") == ["NEW"] * 2


@pytest.mark.parametrize("direction", ["_recv", "_send"])
def test_an_interrupt_in_the_middle_of_a_message_leaves_it_whole(pool, direction):
    main, large = threading.main_thread().ident, 100_000_000
    moments = []

    def interrupt():
        while not moments:
            frame = sys._current_frames()[main]
            size = frame.f_locals.get("size" if direction == "_recv" else "remaining", 0)
            if frame.f_code.co_name == direction and size >= large:
                moments.append(size)
        signal.pthread_kill(main, signal.SIGINT)

    pids = pool.pids
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        if direction == "_recv":
            pool.run(bytes, large)
        pool.run(len, bytes(large))
    thread.join()
    assert pool.run(os.getpid) == pids == pool.pids


def test_threads_take_turns(pool):
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda number: pool.run(int, number), range(24)))
    assert answers == [[number] * 4 for number in range(24)]


@pytest.mark.parametrize("ending", ["close", "restart"])
def test_another_thread_may_end_a_call(tmp_path, ending):
    with Ranks(2) as ranks:

        def end():
            while not (tmp_path / "begun").exists():
                time.sleep(0.01)
            getattr(ranks, ending)()

        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises(RankError, match="The ranks are not running: they were closed"):
            ranks.cell(f"import time\nopen('{tmp_path}/begun', 'w')\ntime.sleep(600)")
        thread.join()
        if ending == "restart":
            assert ranks.run(os.getpid) == ranks.pids


def fork(seconds):
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
    return os.getpid(), child


def test_a_forked_child_neither_answers_nor_outlives_its_rank():
    with Ranks(2) as ranks:
        for seconds in [0.0] * 5 + [600.0]:
            answers, children = zip(*ranks.run(fork, seconds))
            assert list(answers) == ranks.pids
            assert gone(children) if seconds == 0.0 else not gone(children, 0)
    assert gone(children)


@pytest.mark.parametrize("line", ["sys.stdout.close()", "sys.stdout = None", "del sys.stdout"])
def test_a_cell_may_spoil_its_standard_output(pool, capsys, line):
    pool.cell(f"import sys\n{line}")
    pool.cell("print('here')")
    assert capsys.readouterr().out == "all ranks │ here\n"


def test_ranks_whose_folder_is_gone_end():
    with Ranks(1) as ranks:
        with pytest.raises(RankError, match=r"The ranks were ended: their folder .* is gone"):
            ranks.cell(f"import shutil\nshutil.rmtree('{ranks._folder}')\n1 / 0")
        ranks.restart()
        shutil.rmtree(ranks._folder)
        with pytest.raises(RankError, match=r"The ranks are not running: their folder .* is gone"):
            ranks.run(os.getpid)


def test_a_notebooks_function_may_drag_a_module_of_torch_along(pool):
    source = (
        "import torch\n"
        "config = 3\n"
        "def function():\n"
        "    import torch.distributed as dist\n"
        "    return dist.get_rank() + torch.tensor(config).item()\n"
    )
    namespace = {"__name__": "__main__"}  # as in a notebook: the function is pickled by value
    exec(source, namespace)
    with pytest.raises(TypeError, match="pickle"):  # why the pool has its own pickler
        cloudpickle.dumps(namespace["function"])
    assert pool.run(namespace["function"]) == [3, 4, 5, 6]


def test_a_missing_variable_is_named(pool):
    with pytest.raises(RankError, match="nothing_here"):
        pool.get("nothing_here")


def test_a_collective_that_never_completes_ends_with_all_stacks():
    with Ranks(3, timeout=LIMIT) as ranks:
        start = time.monotonic()
        with pytest.raises(RankError) as error:
            ranks.cell(
                "import time\n"
                "if rank == 0:\n    dist.all_reduce(torch.ones(1))\n"
                "elif rank == 1:\n    time.sleep(100)\n"
                "else:\n    dist.barrier()"
            )
        text = str(error.value)
        assert time.monotonic() - start < 40  # rank 1 sleeps for 100
        assert HUNG in text
        line = "line 3: dist.all_reduce(torch.ones(1))"
        assert f"rank 0 │ waiting in all_reduce\n       │ {line}" in text
        assert "rank 1 │ running, in no collective\n       │ line 5: time.sleep(100)" in text
        assert "rank 2 │ waiting in barrier\n       │ line 7: dist.barrier()" in text
        assert ranks.run(total_of_ranks, 1)[0].tolist() == [3.0] * 3


@pytest.mark.parametrize(
    "call",
    first(2, [
        "recv(torch.ones(1), src=1)",
        "all_reduce(torch.ones(1), group=pair)",
        "barrier()",
        "all_gather([torch.ones(1)] * 2, torch.ones(1))",
    ]),
)
def test_every_kind_of_call_keeps_the_time_limit(call):
    with Ranks(2, timeout=LIMIT) as ranks:
        ranks.cell("pair = dist.new_group([0, 1])")
        start = time.monotonic()
        with pytest.raises(RankError, match=HUNG):
            ranks.cell(f"if rank == 0: dist.{call}")
        assert time.monotonic() - start < 25  # the default time limit is 30


def test_a_hang_inside_ddps_backward_is_a_hang():
    with Ranks(2, timeout=LIMIT) as ranks:
        with pytest.raises(RankError) as error:
            ranks.cell(
                "from torch.nn.parallel import DistributedDataParallel as DDP\n"
                "model = DDP(torch.nn.Linear(4, 4))\n"
                "if rank == 0:\n    model(torch.ones(1, 4)).sum().backward()"
            )
        text = str(error.value)
        assert HUNG in text
        assert "rank 0 │ waiting in backward, in a collective\n       │ line 4: model(" in text
        assert "rank 1 │ had finished" in text


def test_a_cell_on_some_ranks_that_waits_for_the_others_says_who_is_absent():
    with Ranks(2, timeout=LIMIT) as ranks:
        with pytest.raises(RankError) as error:
            ranks.cell("dist.all_reduce(torch.ones(1))", on=[0])
        assert "rank 1 │ does not run this cell" in str(error.value)
        assert ranks.run(total_of_ranks, 1)[0].tolist() == [1.0] * 3


def test_a_rank_that_cannot_be_interrupted_is_killed_and_restart_helps():
    with Ranks(2, timeout=LIMIT) as ranks:
        pids = ranks.pids
        with pytest.raises(RankError, match=r"rank 1 did not end after a failure.*restart\(\)"):
            ranks.cell(
                "import signal, time\n"
                "if rank == 1:\n"
                "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
                "    time.sleep(100)\n"
                "dist.barrier()"
            )
        assert gone(pids)
        with pytest.raises(RankError, match=r"not running.*restart\(\)"):
            ranks.run(os.getpid)
        ranks.restart()
        assert ranks.run(os.getpid) == ranks.pids


@pytest.mark.parametrize("moment", ["idle", "busy"])
def test_a_killed_rank_is_noticed_at_once_and_named(moment):
    with Ranks(3) as ranks:
        victim, pids = ranks.pids[1], ranks.pids
        delay = 0.3 if moment == "busy" else 0
        timer = threading.Timer(delay, os.kill, (victim, signal.SIGKILL))
        timer.start()
        if moment == "idle":
            timer.join()
        start = time.monotonic()
        said = r"(?s)Rank 1 was killed by SIGKILL.*restart\(\)"
        with pytest.raises(RankError, match=said) as error:
            ranks.cell("import time\nif rank == 1: time.sleep(60)\ndist.barrier()")
        assert time.monotonic() - start < 20, error.value  # the others would wait for 30
        assert gone(pids)
        ranks.restart()
        assert ranks.run(total_of_ranks, 1)[0].tolist() == [3.0] * 3


def die_or_sum(victim, group):
    """Kill rank `victim`; the others notice, form a new group and sum their ranks."""
    me, size = dist.get_rank(), dist.get_world_size()
    if me == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.ones(1))
        return "no rank was missed"
    dist.destroy_process_group()
    left = [rank for rank in range(size) if rank != victim]
    store = dist.FileStore(group, len(left))
    dist.init_process_group("gloo", store=store, rank=left.index(me), world_size=len(left))
    total = torch.full((1,), float(me))
    dist.all_reduce(total)
    return total.item()


def test_ranks_that_may_die_leave_the_others(tmp_path):
    with Ranks(4, device="cpu", timeout=5.0, may_die=True) as ranks:
        ranks.cell("kept = rank")
        results = ranks.run(die_or_sum, 2, str(tmp_path / "group"))
        assert results == [4.0, 4.0, Dead(-signal.SIGKILL), 4.0]
        assert ranks.alive == [0, 1, 3]
        assert ranks.get("kept") == [0, 1, Dead(-9), 3]
        os.kill(ranks.pids[0], signal.SIGKILL)  # between two calls
        assert ranks.run(os.getpid) == [Dead(-9), ranks.pids[1], Dead(-9), ranks.pids[3]]
        with pytest.raises(RankError, match="they have no process group"):
            ranks.cell("1 / 0")
        assert ranks.get("kept") == [Dead(-9), 1, Dead(-9), 3]
        ranks.restart()
        assert ranks.run(total_of_ranks, 1)[3].tolist() == [6.0] * 3


def test_closing_leaves_nothing():
    ranks = Ranks(2)
    pids, folder = ranks.pids, ranks._folder
    ranks.close()
    ranks.close()
    assert gone(pids) and not os.path.exists(folder)
    with pytest.raises(RankError, match="closed"):
        ranks.run(os.getpid)


def test_a_pool_nobody_holds_ends():
    pids = Ranks(2).pids
    assert gone(pids)


@pytest.mark.parametrize(
    "name, values",
    [
        ("size", [0, -1, 2.0, "4", True, 1000]),
        ("seed", [-1, 2**40, 1.5, "x", True]),
        ("timeout", [0, "9", None, 1e300, float("nan")]),
    ],
)
def test_wrong_numbers_are_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} {re.escape(repr(value))} is not a .*: give"):
            Ranks(**{"size": 2, name: value})


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="'tpu'"):
        Ranks(2, device="tpu")
    if torch.cuda.device_count() == 0:
        with pytest.raises(ValueError, match="2 ranks need 2 GPUs but this machine has 0"):
            Ranks(2, device="cuda")


@pytest.mark.parametrize("on", [[7], [-1], "abc", [0, None]])
def test_ranks_that_are_not_there_are_named(pool, on):
    with pytest.raises(ValueError, match="names ranks that do not exist: give 0 to 3"):
        pool.cell("1", on=on)


@pytest.mark.parametrize(
    "line, parts",
    [
        ("", ("", "")),
        (" 0,2 ", ("", "0,2")),
        ("pair", ("pair", "")),
        (" pair_2 1 0", ("pair_2", "1 0")),
    ],
)
def test_the_magics_line(line, parts):
    assert parse_line(line) == parts


def test_a_cell_runs_on_the_group_that_is_meant(pool):
    """The named one, `ranks` or the newest, whatever has been opened and closed meanwhile."""
    with Ranks(1) as pair, Ranks(1) as newest:
        variables = {"ranks": pool, "pair": pair, "_": pair, "number": 3}
        assert open_pool("", variables) is pool
        assert open_pool("pair", variables) is pair
        assert open_pool("", {"pair": pair}) is newest
        for name in ("number", "unknown"):
            with pytest.raises(RankError, match=f"%%ranks {name}: .* are pair, ranks.$"):
                open_pool(name, variables)
        pair.close()
        with pytest.raises(RankError, match="%%ranks pair: no open ranks have this name"):
            open_pool("pair", variables)
        assert open_pool("", {"ranks": pair}) is newest
        newest.restart()
        assert open_pool("newest", {"newest": newest}) is newest


def test_the_magics_argument():
    assert parse_ranks("", 4) is None
    assert parse_ranks(" 0,2 ", 4) == [0, 2]
    assert parse_ranks("3 1", 4) == [1, 3]
    for line in ("4", "-1", "a", "0;1"):
        with pytest.raises(RankError, match="give ranks from 0 to 3"):
            parse_ranks(line, 4)


# ---- deadlocks, without a time limit


WAIT = {
    "in a call": lambda: dist.recv(torch.ones(1), 1 - dist.get_rank()),
    "for a handle": lambda: dist.irecv(torch.ones(1), 1 - dist.get_rank()).wait(),
    "for one that is done": lambda: dist.barrier() if dist.get_rank() else None,
}


@pytest.mark.parametrize("where", WAIT)
def test_a_deadlock_ends_long_before_the_time_limit(where):
    limit = patience(100)
    with Ranks(2, timeout=limit, end_deadlocks=True) as ranks:
        begun = time.monotonic()
        with pytest.raises(RankError, match="did not complete and never will"):
            ranks.run(WAIT[where])
        assert time.monotonic() - begun < limit / 2


def late(seconds):
    time.sleep(seconds if dist.get_rank() else 0.0)
    dist.barrier()
    return True


def test_who_sleeps_for_a_moment_is_no_deadlock():
    with Ranks(2, end_deadlocks=True) as ranks:
        assert ranks.run(late, 3.0) == [True, True]
