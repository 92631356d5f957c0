"""Given: one rank's shard of the model, with room for the keys and values of several requests.

    shard = Shard(folder, rank=0, size=2, slots=4, layer=layer)
    token = shard.prefill(0, [312, 7, 90])        # a new request in slot 0: its first token
    tokens = shard.decode([0, 3], [token, 11])    # one more token for the requests in slots 0 and 3

A rank has some of the heads and some of the MLP's columns of every layer; embedding and norms are
whole everywhere. `layer` (yours, in rank.py) puts the parts together. It needs torch and
safetensors only, because it runs inside the server's folder.

Shapes: B requests, T positions, C hidden size, D head size, P positions of the model.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.nn import functional as F

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce")
COLLECTIVES += ("reduce_scatter", "gather", "scatter", "send", "recv", "broadcast_object_list")
COLLECTIVES += ("all_gather_object", "all_to_all", "all_to_all_single", "barrier")


def whole_layer(x, attend, mlp):
    """A layer where one rank has everything: no sum over ranks is needed."""
    x = x + attend(x)
    return x + mlp(x)


class Shard:
    """The part of rank `rank` of `size`; its greedy tokens are those of the whole model."""

    def __init__(self, folder, rank=0, size=1, slots=1, layer=whole_layer, diary=None):
        """folder: config.json and model.safetensors; diary: a file that gets a line for each step
        (what was done, and what was said to the other ranks)."""
        self.layer, self.wire, self.diary = layer, Wire(), diary
        if diary:
            Path(diary).write_text("")
        self.config = json.loads((Path(folder) / "config.json").read_text())
        heads, self.head_size = self.config["num_attention_heads"], self.config["head_dim"]
        if heads % size or self.config["num_key_value_heads"] != heads:
            raise ValueError(f"{heads} heads can not be shared out to {size} ranks: give a divisor")
        self.tensors = {}
        with safe_open(str(Path(folder) / "model.safetensors"), "pt") as file:
            names = file.keys()
            for name in names:
                self.tensors[name] = my_part(file.get_slice(name), name, rank, size).float()
        self.positions = self.config["max_position_embeddings"]
        cache = (self.config["num_hidden_layers"], slots, heads // size)
        self.keys = torch.zeros(*cache, self.positions, self.head_size)
        self.values = torch.zeros(*cache, self.positions, self.head_size)
        self.lengths = [0] * slots  # positions in use
        self.cos, self.sin = rotary(self.config, self.positions)

    def prefill(self, slot, tokens):
        """Reads a request's tokens into an empty slot and returns the token that follows."""
        self.check([slot], tokens)
        if not 0 < len(tokens) < self.positions:
            raise ValueError(f"{len(tokens)} tokens do not fit 1 to {self.positions - 1}")
        self.lengths[slot] = 0
        return self.run("prefill", [slot], torch.tensor([tokens]))[0]

    def decode(self, slots, tokens):
        """The last token of each running request in, the one that follows it out."""
        self.check(slots, tokens)
        if len(slots) != len(tokens) or not slots or len(set(slots)) < len(slots):
            raise ValueError(f"{len(tokens)} tokens for the slots {slots}: one for each, please")
        full = [slot for slot in slots if self.lengths[slot] == self.positions]
        if full:
            raise ValueError(f"slot {full[0]} is full: the model has {self.positions} positions")
        return self.run("decode", slots, torch.tensor(tokens)[:, None])

    def check(self, slots, tokens):
        for slot in slots:
            if slot not in range(len(self.lengths)):
                raise IndexError(f"slot {slot} of {len(self.lengths)}: they begin at 0")
        for token in tokens:
            if not 0 <= token < self.config["vocab_size"]:
                raise ValueError(f"token {token} is not in the vocabulary")

    @torch.no_grad()
    def run(self, what, slots, tokens):
        """tokens (B, T) through all layers; returns the likeliest next token of each row."""
        self.slots = torch.tensor(slots)
        starts = torch.tensor([self.lengths[slot] for slot in slots])
        self.places = starts[:, None] + torch.arange(tokens.shape[1])  # (B, T)
        self.wire.begin()
        self.write({"begins": what})
        x = self.tensors["model.embed_tokens.weight"][tokens]  # (B, T, C)
        for number in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{number}."
            x = self.layer(
                x,
                lambda x, n=number, name=name: self.attend(x, n, name),
                lambda x, name=name: self.mlp(x, name),
            )
        for slot in slots:
            self.lengths[slot] += tokens.shape[1]
        x = self.norm(x[:, -1], "model.norm.weight")
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        largest = (x @ head.T).max(dim=-1)
        self.write(
            {"do": what, "slots": slots, "positions": tokens.shape[1], **self.wire.end()}
            | {"logits": largest.values.tolist()}
        )
        return largest.indices.tolist()

    def attend(self, x, number, name):
        """This rank's heads: (B, T, C) -> its part of the sum (B, T, C)."""
        x = self.norm(x, name + "input_layernorm.weight")
        q, k, v = (
            F.linear(x, self.tensors[f"{name}self_attn.{which}_proj.weight"])
            .unflatten(-1, (-1, self.head_size))
            .transpose(1, 2)
            for which in "qkv"
        )  # (B, heads, T, D)
        q, k = self.rotate(q), self.rotate(k)
        rows = self.slots[:, None], slice(None), self.places  # of the cache: (B, T, heads, D)
        self.keys[number][rows] = k.transpose(1, 2)
        self.values[number][rows] = v.transpose(1, 2)
        length = int(self.places.max()) + 1
        k = self.keys[number][self.slots, :, :length]
        v = self.values[number][self.slots, :, :length]
        seen = torch.arange(length) <= self.places[:, None, :, None]  # (B, 1, T, length)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        return F.linear(y, self.tensors[name + "self_attn.o_proj.weight"])

    def mlp(self, x, name):
        """This rank's columns: (B, T, C) -> its part of the sum (B, T, C)."""
        x = self.norm(x, name + "post_attention_layernorm.weight")
        gate, up, down = (
            self.tensors[f"{name}mlp.{which}_proj.weight"] for which in ("gate", "up", "down")
        )
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.tensors[name], self.config["rms_norm_eps"])

    def rotate(self, x):
        """Turns (B, heads, T, D) by the angles of each row's places."""
        cos, sin = self.cos[self.places][:, None], self.sin[self.places][:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def write(self, line):
        if self.diary:
            with open(self.diary, "a", encoding="utf-8") as diary:
                diary.write(json.dumps(line) + "\n")

    def close(self):
        """As Ranks has it: here nothing is left to end."""


def rotary(config, positions):
    """cos and sin of the angles at every position: (P, D/2) each."""
    size = config["head_dim"]
    theta = config["rope_parameters"]["rope_theta"]
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    return angles.cos(), angles.sin()


def my_part(whole, name, rank, size):
    """What a rank keeps of a stored tensor: whole heads, columns of the MLP, or all of it."""
    kind = name.split(".")[-2]
    if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        first, last = bounds(whole.get_shape()[0], rank, size)
        return whole[first:last]
    if kind in ("o_proj", "down_proj"):
        first, last = bounds(whole.get_shape()[1], rank, size)
        return whole[:, first:last]
    return whole[:]


def bounds(length, rank, size):
    """Where a rank's part begins and ends."""
    return length * rank // size, length * (rank + 1) // size


class Wire:
    """Counts what this process says to the other ranks: calls and bytes of torch.distributed."""

    def __init__(self):
        self.calls, self.bytes = {}, 0
        for name in COLLECTIVES:
            function = getattr(dist, name, None)
            if function and not hasattr(function, "counted"):
                setattr(dist, name, self.counting(name, function))

    def counting(self, name, function):
        def counted(*args, **kwargs):
            self.calls[name] = self.calls.get(name, 0) + 1
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors[:1])
            return function(*args, **kwargs)

        counted.counted = True
        return counted

    def begin(self):
        """What was said since the last step was said outside of the layers."""
        self.outside, self.calls, self.bytes = sum(self.calls.values()), {}, 0

    def end(self):
        seen = {"calls": self.calls, "bytes": self.bytes, "outside": self.outside}
        self.calls, self.bytes = {}, 0
        return seen
