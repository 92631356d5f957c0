"""The fused decode step equals PyTorch's, and its tokens are those of the engine on a CPU."""

from dataclasses import asdict

import pytest
import torch

pytest.importorskip("triton", reason="the Triton language is not installed: make setup TRITON=yes")

from tests.kernels.conftest import interpreter, on  # noqa: F401 (fixtures)
from tests.serving.engines import ODD, TIED, new_model, version_of
from tests.tiers import first
from utils.serving.engine.config import EngineConfig
from utils.serving.engine.model import ServedDecoder
from utils.serving.engine.sampling import Sampler
from utils.serving.engine.scheduler import LAST, NOT_FINITE
from utils.serving.engine.version import Version
from utils.serving.engine.worker import Worker
from utils.serving.export import export

SLOTS = 5


def test_the_numbers_of_rows_that_have_a_graph():
    from utils.serving.engine.fused import sizes_of

    assert sizes_of(30) == [1, 2, 4, 8, 16, 24, 30]
    assert sizes_of(16) == [1, 2, 4, 8, 16] and sizes_of(3) == [1, 2, 3] and sizes_of(1) == [1]


def two_ways(device, folder, dtype):
    """[(logits of the fused step, of PyTorch's, tokens of the fused step)] of decode steps in
    changing batches, with blocks in any order."""
    from utils.kernels import decode

    version = Version.read(folder)
    config = EngineConfig(max_num_seqs=SLOTS, dtype=dtype)
    names = config.dtypes(version.stored, device == "cpu", version.compute)
    fused, plain = (
        ServedDecoder(
            version.model, version.weights(0), 0, 1, SLOTS, 96, None, device,
            *(getattr(torch, name) for name in names), None, None, kernels,
        )
        for kernels in (decode, None)
    )
    last = [0] * SLOTS
    for decoder in (fused, plain):
        first, other = decoder.cache.blocks[1].tolist(), decoder.cache.blocks[4].tolist()
        decoder.cache.assign(1, other[::-1])
        decoder.cache.assign(4, first)
        for slot, length in ((0, 3), (1, 40), (3, 1), (4, 16)):
            logits = decoder.prefill(slot, 0, list(range(2, 2 + length)))
            if decoder.fused:
                token = decoder.fused.join(slot, Sampler(), logits, length - 1)
                assert token.tolist() == logits.argmax(dim=-1).tolist()
            last[slot] = logits.argmax().item()
    found = []
    for number, slots in enumerate(([0], [0, 1, 3, 4], [4, 0, 1], [3], [1, 4])):
        known = [slot + number if number % 2 else last[slot] for slot in slots]
        given = known if number % 2 else [LAST] * len(slots)
        logits, tokens = fused.fused(slots, given, [fused.lengths[slot] for slot in slots])
        for slot, token in zip(slots, tokens.tolist()):
            fused.lengths[slot] += 1
            last[slot] = token
        found.append((logits.cpu(), plain.decode(slots, known).cpu(), tokens.tolist()))
    fused.embedding[9] = torch.nan  # if tied, it affects every row's logits
    logits, tokens = fused.fused([0, 1], [9, 2], [fused.lengths[slot] for slot in (0, 1)])
    finite = logits.isfinite().all(dim=-1)
    assert not finite[0] and torch.equal(tokens == NOT_FINITE, ~finite)
    assert fused.fused.last.min() >= 0
    return found


@pytest.mark.parametrize(
    ("config", "export_as", "dtype"),
    first(
        3,
        [
            (ODD, "int8", "float32"), (TIED, "auto", "bfloat16"), (TIED, "auto", "float32"),
            (ODD, "int4", "float32"), (ODD, "auto", "float32"),
        ],
    ),
)
def test_a_fused_step_is_that_of_pytorchs_way(
    on, tmp_path, config, export_as, dtype  # noqa: F811
):
    model = new_model(tmp_path / "model", config)
    folder = export(model, tmp_path / "repo", 1, dtype=export_as)
    for ours, theirs, tokens in on(two_ways, str(folder), dtype):
        limit = 0.03 if dtype == "bfloat16" else 2e-3 if export_as == "int8" else 1e-5
        assert (ours - theirs).abs().mean() < limit * theirs.abs().mean()
        assert tokens == ours.argmax(dim=-1).tolist()


def drawn(device, folder, company):
    """Tokens sampled in slot 0, with or without other slots that sample."""
    from utils.kernels import decode

    version = Version.read(folder)
    decoder = ServedDecoder(
        version.model, version.weights(0), 0, 1, SLOTS, 96, None, device, kernels=decode
    )
    slots = [0, *company]
    for slot in slots:
        logits = decoder.prefill(slot, 0, [5, 6])
        decoder.fused.join(slot, Sampler(1.0, seed=7 + slot), logits, 1)
    tokens = [decoder.fused.last[0].item()]
    for position in range(2, 8):
        _, chosen = decoder.fused(slots[::-1], [LAST] * len(slots), [position] * len(slots))
        tokens.append(chosen[-1].item())
    return tokens


def test_what_a_row_draws_is_independent_of_its_company(on, tmp_path):  # noqa: F811
    folder = str(version_of(TIED, tmp_path, 1))
    alone = on(drawn, folder, [])
    assert len(set(alone)) > 1 and alone == on(drawn, folder, [1, 3])


def answers(folder, fused):
    """A rank's answers to a batch of requests of all kinds, and to one that is read again."""
    from utils.kernels import decode

    setup = {"folder": folder, "threads": 1, "rank": 0}
    config = EngineConfig(max_num_seqs=SLOTS, device="cpu", enforce_eager=True)
    worker = Worker(setup | {"config": asdict(config)})
    if fused:  # as on a GPU
        version = Version.read(folder)
        worker.decoder = ServedDecoder(
            version.model, version.weights(0), 0, 1, SLOTS, 96, None, kernels=decode
        )
        worker.fused = worker.decoder.fused

    def step(prefill=(), slots=(), tokens=()):
        return worker.step({"prefill": prefill, "slots": slots, "tokens": tokens, "blocks": []})

    read = {"start": 0, "tokens": [5, 6, 7]}
    kinds = ([0.0, 0, 1.0, None], [0.9, 5, 1.0, 3], [1.1, 0, 0.8, 4])
    chunks = [read | {"slot": slot, "sampling": kind} for slot, kind in enumerate(kinds)]
    chunks[0]["logprobs"] = 2
    said = [step(chunks)] + [step((), [2, 0, 1], [LAST] * 3) for _ in range(3)]
    again = {
        "slot": 4, "start": 0, "tokens": [5, 6, 7, *(one["tokens"][1] for one in said[:1])],
        "sampling": kinds[1], "drawn": 1,
    }
    return [*said, step([again], [2], [LAST])]


def test_a_rank_with_the_fused_step_answers_as_one_without(interpreter, tmp_path):  # noqa: F811
    folder = str(version_of(TIED, tmp_path, 1))
    ours, theirs = interpreter(answers, folder, True), interpreter(answers, folder, False)
    assert [one["tokens"] for one in ours] == [one["tokens"] for one in theirs]
    for one, other in zip(ours, theirs):
        assert one.keys() == other.keys()
        for place, pairs in one.get("logprobs", {}).items():
            assert [token for token, _ in pairs] == [t for t, _ in other["logprobs"][place]]
    assert ours[-1]["tokens"][0] == ours[1]["tokens"][2]  # read again, it draws the same token
