"""Lab 16: the answers that its checks must accept and reject, against a real server."""

import os
import subprocess
import sys

import psutil
import pytest
import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.paths import ROOT
from utils.serving.server import server_available
from utils.workshop import labs

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(server_available() is not None, reason=str(server_available())),
]

LAB = Lab(
    "16_deploy_to_triton",
    {
        "config": ("check_config", "config", "config.py"),
        "rank": ("check_rank", "rank", "rank.py"),
        "batch": ("check_batch", "batch", "scheduler.py"),
        "goal": ("check_goal", "goal", "settings.py"),
    },
)

OTHERS = {
    "config: other spelling, a name, lists one by one": """
def config(tp):
    tensors = [("input_ids", -1, ""), ("max_tokens", 1, "optional: true")]
    tensors.append(("arrival", 3, "optional: true"))
    lines = [
        f'input {{ name: "{name}" data_type: TYPE_INT32 dims: {size} {rest} }}'
        for name, size, rest in tensors
    ]
    lines += ['name: "lab"', 'backend: "python"', "instance_group { kind: KIND_MODEL count: 1 }"]
    lines.append('output { name: "output_ids" data_type: TYPE_INT32 dims: [-1] }')
    lines.append("model_transaction_policy: { decoupled: true }  # a stream")
    for key, value in (("slots", 4), ("tp", tp), ("comment", "mine")):
        lines.append(f'parameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}')
    return "\\n".join(lines)
""",
    "rank: a loop over readline, the sum by a function": """
def summed(x):
    dist.all_reduce(x)
    return x


def layer(x, attend, mlp):
    x = summed(attend(x)).add(x)
    return x.add(summed(mlp(x)))


def loop(shard, commands, answers, rank):
    while line := commands.readline():
        command = json.loads(line)
        what = command.pop("do")
        try:
            tokens = getattr(shard, what)(*command.values())
            answer = {"tokens": tokens if what == "decode" else [tokens]}
        except ValueError as error:
            answer = {"error": f"refused: {error}"}
        if not rank:
            answers.write(json.dumps(answer) + "\\n")
            answers.flush()
""",
    "goal: as few slots as will do, as long a queue": """
def settings():
    return dict(queue=20, slots=4, tp=2)
""",
    "batch: all decode first, then leave, then join; and the new ones decode at once": """
def join(waiting, running, slots):
    free = [slot for slot in range(slots) if slot not in running]
    there = [request for request in waiting if not request.over]
    waiting.clear()
    waiting.extend(there[len(free) :])
    running.update(zip(free, there))
    return free[: len(there)]


def step(waiting, running, slots, model):
    leave(running)
    for slot in join(waiting, running, slots):
        running[slot].begin(model, slot)
    leave(running)
    order = sorted(running, reverse=True)
    if order:
        for slot, token in zip(order, model.decode(order, [running[s].last for s in order])):
            running[slot].add(token)
    leave(running)
""",
}


class TestLab(LabTests):
    lab, others, least = LAB, OTHERS, 60


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_prompts_leave_no_doubt():
    """What the answers are compared with does not hang on the last digits of a logit."""
    from labs.support.deploy_to_triton import lab_server

    for number, count in ((0, 48), (1, 48), (2, 16)):
        tokens = [*lab_server.prompt(number), *lab_server.right(number, count)]
        with torch.no_grad():
            logits = lab_server.model()(torch.tensor([tokens]))[
                0, len(lab_server.prompt(number)) - 1 : -1
            ]
        first, second = logits.topk(2).values.T
        assert (first - second).min() > 0.003
        assert torch.allclose(first, torch.tensor(lab_server.right_logits(number, count)))


def test_nothing_is_measured_where_nothing_is_written(tmp_path):
    from labs.support.deploy_to_triton import lab_server, measurements

    for name in ("config.py", "rank.py", "scheduler.py", "settings.py"):
        (tmp_path / name).write_text(labs.generated(LAB.solution / name, ROOT))
    config, rank, scheduler, settings = (str(path) for path in sorted(tmp_path.glob("*.py")))
    assert measurements.batches(scheduler) is None and measurements.loads(settings) is None
    assert measurements.together(config, rank, scheduler) is None
    assert lab_server._here["server"] is None, "a server was started for nothing"


def test_the_server_and_the_ranks_forkserver_end_with_their_process():
    code = """
import psutil
from labs.support.deploy_to_triton import lab_server
print(lab_server.server().pid)
lab_server.forkserver()
for process in psutil.Process().children(recursive=True):
    print(process.pid)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(set(pids)) >= 4, "each has a supervisor"
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
