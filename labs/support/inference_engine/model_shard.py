"""Given: one rank's shard of the model, with room for the keys and values of several requests.

    shard = Shard(folder, rank=0, size=2, slots=4, layer=layer)
    token = shard.prefill(0, [312, 7, 90])        # a new request in slot 0: its first token
    tokens = shard.decode([0, 3], [token, 11])    # one more token for the requests in slots 0 and 3

The decoder is the workshop's own (utils/models/gpt.py), with its layers sharded by the table in
utils/models/tp_plan.py and with the engine's cache (utils/serving/engine/model.py). A rank has some
of the heads and MLP columns of every layer; every rank has the whole embedding and all norms.
`layer` (yours, in rank.py) combines attention and MLP.

Shapes: B requests, T positions, C hidden size, D head size, P positions of the model.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F

from utils.measure.traffic import Traffic
from utils.models import gpt
from utils.models.config import GPTConfig
from utils.models.tp_plan import tp_cuts
from utils.serving.engine.model import KVCache


def whole_layer(x, attend, mlp):
    """A layer that is whole on one rank: no sum over ranks is needed."""
    x = x + attend(x)
    return x + mlp(x)


class Layer(gpt.Block):
    """A layer of the decoder whose attention and MLP are combined by `layer`."""

    def __init__(self, config, layer):
        super().__init__(config)
        self.layer = layer

    def forward(self, x, cos, sin, cache):
        return self.layer(
            x,
            lambda x: self.self_attn(self.input_layernorm(x), cos, sin, cache),
            lambda x: self.feed_forward(self.post_attention_layernorm(x)),
        )


class Shard:
    """The shard of rank `rank` of `size`; its greedy tokens are those of the whole model."""

    def __init__(self, folder, rank=0, size=1, slots=1, layer=whole_layer, diary=None):
        """folder: config.json and model.safetensors; diary: a file that gets a line per step
        (what was done, and how many bytes this rank passed to collectives)."""
        self.diary = diary
        if diary:
            Path(diary).write_text("")
        config = GPTConfig.from_hf(json.loads((Path(folder) / "config.json").read_text()))
        weights = my_part(folder, tp_cuts(config, size), rank)
        embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = nn.ModuleList(Layer(config, layer) for _ in range(config.layers))
        norm = gpt.RMSNorm(config.hidden_size, config.norm_eps)
        self.decoder = gpt.Decoder(config, embedding, layers, norm)
        for name, parameter in self.decoder.named_parameters():
            parameter.data = weights[f"model.{name}"]
        self.head = weights.get("lm_head.weight", embedding.weight)
        self.words, self.positions = config.vocab_size, config.max_positions
        kv_heads, numbers = config.key_value_heads // size, torch.float32
        self.cache = KVCache(config, kv_heads, slots, self.positions, "cpu", numbers, numbers)
        self.lengths = [0] * slots  # positions in use

    def prefill(self, slot, tokens):
        """Read a request's tokens into an empty slot and return the token that follows."""
        self.check(tokens)
        if not 0 < len(tokens) < self.positions:
            raise ValueError(f"{len(tokens)} tokens do not fit 1 to {self.positions - 1}")
        self.lengths[slot] = 0
        return self.run("prefill", [slot], torch.tensor([tokens])).argmax().item()

    def decode(self, slots, tokens):
        """Take the last token of each running request and return the next one."""
        self.check(tokens)
        return self.run("decode", slots, torch.tensor(tokens)[:, None]).argmax(dim=-1).tolist()

    def check(self, tokens):
        for token in tokens:
            if not 0 <= token < self.words:
                raise ValueError(f"token {token} is not in the vocabulary")

    @torch.inference_mode()
    def run(self, what, slots, tokens):
        """Run tokens (B, T) through all layers; return the logits after each row, (B, words)."""
        starts = torch.tensor([self.lengths[slot] for slot in slots])
        places = starts[:, None] + torch.arange(tokens.shape[1])  # (B, T)
        length = int(places.max()) + 1
        seen = torch.arange(length) <= places[:, None, :, None]  # (B, 1, T, length)
        cache = self.cache.begin(torch.tensor(slots), places, length, seen, causal=False)
        with Traffic() as traffic:
            x = self.decoder(tokens, context=cache)  # (B, T, C)
        for slot in slots:
            self.lengths[slot] += tokens.shape[1]
        if self.diary:
            line = {"do": what, "slots": slots, "bytes": traffic.payload()}
            with open(self.diary, "a", encoding="utf-8") as diary:
                diary.write(json.dumps(line) + "\n")
        return F.linear(x[:, -1], self.head)

    def close(self):
        """Do nothing: `Ranks` has processes to end, a single shard has none."""


def my_part(folder, cuts, rank):
    """{name: tensor}: this rank's shards of the layers' tensors, and all others whole."""
    found = {}
    with safe_open(str(Path(folder) / "model.safetensors"), "pt") as file:
        for name in file.keys():  # noqa: SIM118 (no dict)
            whole = file.get_tensor(name)
            part = cuts[name].part(rank, whole) if ".layers." in name else whole
            found[name] = part.to(torch.float32, copy=True)  # not a view of the whole
    return found
