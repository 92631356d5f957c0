"""A job on two nodes outlives one of them: Slurm's daemons are real, the nodes are namespaces."""

import psutil
import pytest

from utils.ranks.slurm import Slurm

REASON = Slurm.available()
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append --output={log}
srun sh -c 'echo "turn ${{SLURM_RESTART_COUNT:-0}} $(hostname)"
    [ -n "${{SLURM_RESTART_COUNT:-}}" ] || sleep 600'
"""


def test_a_job_is_requeued_when_a_node_dies(tmp_path):
    log, script = tmp_path / "job.log", tmp_path / "job.sh"
    script.write_text(JOB.format(log=log))

    def turns():
        return sorted(line for line in log.read_text().splitlines() if line.startswith("turn"))

    with Slurm(2) as slurm:
        assert sorted(slurm.shell("srun --nodes=2 hostname").split()) == ["node1", "node2"]
        assert slurm.shell(f"sbatch {script}") == "Submitted batch job 2"
        slurm.wait_until(lambda: log.exists() and len(turns()) == 2)
        slurm.kill(2)
        slurm.wait_until(lambda: "down" in slurm.shell("sinfo --noheader --nodes=node2"))
        slurm.revive(2)
        slurm.wait_until(lambda: not slurm.shell("squeue --noheader"))
    assert turns() == ["turn 0 node1", "turn 0 node2", "turn 1 node1", "turn 1 node2"]
    assert not slurm.folder.exists()
    left = [p for p in psutil.process_iter() if str(slurm.folder) in " ".join(p.cmdline())]
    assert not left
