"""A rank's shard of the model: logits close to the whole model's, collectives counted.

The decoders run on real ranks, so that the logits and the traffic of each step are observable.
"""

import os
import signal

import pytest
import torch

from tests.serving.engines import ODD, TIED, version_of
from utils.models.gpt import GPT
from utils.ranks import Ranks
from utils.serving.engine.config import EngineConfig
from utils.serving.engine.ranks import RankDied, RankGroup
from utils.serving.engine.version import Version

pytestmark = pytest.mark.timeout(300)


def steps_on_rank(folder, tp):
    """[(rank 0's logits or None, traffic, its table)] of steps; three requests join and leave."""
    import torch
    import torch.distributed as dist

    from utils.measure.traffic import Traffic
    from utils.serving.engine.model import ServedDecoder
    from utils.serving.engine.version import Version

    rank = dist.get_rank()
    version = Version.read(folder)
    decoder = ServedDecoder(
        version.model, version.weights(rank), rank, tp, max_num_seqs=4, max_model_len=96,
        prompts=version.prompt_tensors(),
    )
    decoder.cache.assign(3, [23, 1])  # its first two blocks lie anywhere
    steps = [
        lambda: decoder.prefill(1, 0, [5, 6, 7]),
        lambda: decoder.decode([1], [8]),
        lambda: decoder.prefill(3, 0, [9] * 6, prompt=("kind", 0, 5), logits=False),
        lambda: decoder.decode([1], [9]),  # while 3 is partly read
        lambda: decoder.prefill(3, 11, [10, 11]),
        lambda: decoder.decode([1, 3], [10, 12]),
        lambda: decoder.decode([3], [13]),  # 1 has left
        lambda: decoder.prefill(1, 0, [20]),  # its slot serves another request
        lambda: decoder.decode([3, 1], [14, 21]),
    ]
    out = []
    for step in steps:
        with Traffic() as traffic:
            logits = step()
        said = {
            name: (traffic.calls(name), traffic.payload(name)) for name in ("all_reduce", "gather")
        }
        out.append((None if logits is None else torch.clone(logits), said, str(traffic)))
    return out


# Per step: [(tokens read, with prompt?) per row of logits], positions computed
STEPS = [
    ([([5, 6, 7], False)], 3),
    ([([5, 6, 7, 8], False)], 1),
    (None, 11),
    ([([5, 6, 7, 8, 9], False)], 1),
    ([([9] * 6 + [10, 11], True)], 2),
    ([([5, 6, 7, 8, 9, 10], False), ([9] * 6 + [10, 11, 12], True)], 2),
    ([([9] * 6 + [10, 11, 12, 13], True)], 1),
    ([([20], False)], 1),
    ([([9] * 6 + [10, 11, 12, 13, 14], True), ([20, 21], False)], 2),
]


@pytest.mark.parametrize("config, tp", [(ODD, 1), (ODD, 2), (ODD, 4), (TIED, 2)])
def test_logits_and_traffic_of_each_step(config, tp, tmp_path):
    from utils.prompts.embedding import prompted

    prompt = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1))
    folder = version_of(config, tmp_path, tp, {"kind": prompt})
    model = GPT.from_pretrained(tmp_path / "model")
    with Ranks(tp, device="cpu") as ranks:
        by_rank = ranks.run(steps_on_rank, str(folder), tp)
    assert all(logits is None for rank in by_rank[1:] for logits, _, _ in rank)
    words = -(-config.vocab_size // tp)
    for rank, steps in enumerate(by_rank):
        for (rows, positions), (_, said, table) in zip(STEPS, steps):
            if tp == 1:
                assert said == {"all_reduce": (0, 0), "gather": (0, 0)}
                continue
            calls = 2 * config.layers + 1
            gathered = (1, 4 * len(rows) * words) if rows else (0, 0)
            embedded = 6 if positions == 11 else positions  # every rank has all virtual tokens
            numbers = (2 * config.layers * positions + embedded) * config.hidden_size
            assert said["all_reduce"] == (calls, 4 * numbers), table
            assert said["gather"] == gathered, (rank, table)
    for (rows, _), (logits, _, _) in zip(STEPS, by_rank[0]):
        assert (rows is None) == (logits is None)
        for row, (tokens, with_prompt) in enumerate(rows or []):
            with torch.no_grad(), prompted(model, prompt if with_prompt else None):
                whole = model(torch.tensor([tokens]))[0, -1]
            torch.testing.assert_close(logits[row], whole, rtol=1e-4, atol=1e-4 * whole.abs().max())


def test_a_stopped_rank_does_not_hold_its_leader(tmp_path):
    """Not even with a command too large for its pipe."""
    version = Version.read(version_of(ODD, tmp_path, 1))
    group = RankGroup(version, EngineConfig(step_seconds=1.0))
    try:
        group.ready()
        os.kill(group.pids[0], signal.SIGSTOP)
        with pytest.raises(RankDied, match="is stopped: no answer in 1 seconds"):
            group.send({"slots": list(range(100_000))})
    finally:
        group.close()
