"""The tensor-parallel plan: its shapes are the model's, and the shards make up the whole."""

import pytest

from utils.models.config import GPTConfig
from utils.models.gpt import GPT
from utils.models.tp_plan import head_shares, rank_shapes, tp_cuts

CONFIGS = [
    GPTConfig(vocab_size=61, hidden_size=24, layers=2, heads=4, kv_heads=2),
    GPTConfig(61, 24, 2, heads=4, attention_bias=True, mlp_bias=True, intermediate_size=37),
    GPTConfig(67, 16, 3, heads=2, tie_embeddings=True, head_dim=6),
    GPTConfig(61, 16, 2, heads=4, experts=4, intermediate_size=21),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_shapes_are_those_of_the_model(config):
    shapes = {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}
    assert config.parameter_shapes() == shapes


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_make_up_the_whole(config, ranks):
    cuts = tp_cuts(config, ranks)
    parts = [rank_shapes(config, rank, ranks) for rank in range(ranks)]
    for name, whole in config.parameter_shapes().items():
        held = [shapes[name] for shapes in parts if name in shapes]
        if cuts[name].dim is None:
            assert held and all(shape == whole for shape in held)
            assert name.endswith("bias") == (len(held) < ranks) or ranks == 1
        else:
            assert sum(shape[cuts[name].dim] for shape in held) == whole[cuts[name].dim]


def test_too_few_key_value_heads_are_not_shared_out():
    assert head_shares(6, 3, 2) == ((4, 2), (2, 1))
    assert head_shares(10, 2, 3) == ((4, 3, 3), None)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (0, "tp 0 is not a number of ranks"),
        (4, "tp 4 does not divide the model's 4 heads and 2 key-value heads: give 1 or 2"),
    ],
)
def test_what_cannot_be_shared_is_refused(ranks, why):
    with pytest.raises(ValueError, match=why):
        tp_cuts(CONFIGS[0], ranks)
