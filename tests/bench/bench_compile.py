"""A decode step under several compilers: `python -m tests.bench.bench_compile`.

The model's own code with a cache of fixed length, on one thread: eager, with torch.compile, and
ahead of time (torch.export, then AOTInductor, whose file loads elsewhere without compiling).
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from utils.measure.timing import in_turn
from utils.models.gpt import GPT, rotary_tables

POSITIONS = 128  # of the cache
ROUNDS = 9


class Cache(nn.Module):
    """Keys and values of one layer, (B, H, POSITIONS, D), as `Attention` calls them."""

    def __init__(self, rows: int, heads: int, size: int):
        super().__init__()
        self.register_buffer("k", torch.zeros(rows, heads, POSITIONS, size))
        self.register_buffer("v", torch.zeros(rows, heads, POSITIONS, size))

    def attend(self, q, k, v):
        rows = torch.arange(len(q))
        self.k[rows, :, self.at], self.v[rows, :, self.at] = k[:, 0], v[:, 0]
        mask = (torch.arange(POSITIONS) <= self.at[:, None])[:, None, None]  # (B, 1, 1, P)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), self.k, self.v, attn_mask=mask)
        return y.transpose(1, 2).flatten(2)


class Step(nn.Module):
    """tokens (B, 1) at positions (B,) -> logits (B, V)."""

    def __init__(self, model: GPT, rows: int):
        super().__init__()
        config, self.model = model.config, model
        self.layers = nn.ModuleList(
            Cache(rows, config.key_value_heads, config.head_size) for _ in range(config.layers)
        )
        cos, sin = rotary_tables(config, torch.arange(POSITIONS), torch.float32)
        self.register_buffer("all_cos", cos)
        self.register_buffer("all_sin", sin)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.at = positions
        return self.model.lm_head(self.model.model(tokens, context=self))[:, -1]

    def tables(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The rotary tables that `Decoder` needs, (B, 1, 1, D) each."""
        positions = self.layers[0].at
        return [table[positions][:, None, None] for table in (self.all_cos, self.all_sin)]


@torch.no_grad()
def measure(folder: Path | str, rows: tuple[int, ...] = (1, 16)) -> list[dict]:
    """Return [{"how", "rows", "ms", "seconds"}]: median ms per step, seconds to compile."""
    threads, found = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for many in rows:
            found += _measured(Step(GPT.from_pretrained(folder, torch.float32), many), many)
    finally:
        torch.set_num_threads(threads)
    return found


def _measured(step, rows):
    given = torch.full((rows, 1), 7), torch.full((rows,), 40)
    ways, seconds = {"eager": torch.inference_mode()(step)}, {"eager": 0.0}
    right = ways["eager"](*given)
    for how, make in (("torch.compile", _compiled), ("ahead of time", _ahead)):
        begin = time.perf_counter()
        ways[how] = make(step, given)
        torch.testing.assert_close(ways[how](*given), right, rtol=1e-3, atol=1e-3)
        seconds[how] = time.perf_counter() - begin
    spent = in_turn({how: partial(way, *given) for how, way in ways.items()}, ROUNDS)
    return [
        {"how": how, "rows": rows, "ms": round(1e3 * one, 2), "seconds": round(seconds[how], 1)}
        for how, one in spent.items()
    ]


def _compiled(step, given):
    torch._dynamo.reset()
    return torch.compile(step)


def _ahead(step, given):
    with tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(step, given)
        file = torch._inductor.aoti_compile_and_package(
            program, package_path=str(Path(folder, "step.pt2"))
        )
        return torch._inductor.aoti_load_package(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compilers and a decode step.")
    parser.add_argument("--model", default="models/base", help="checkpoint folder")
    for one in measure(parser.parse_args().model):
        print("{how:<14} {rows:>2} rows {ms:>8} ms {seconds:>7} s to compile".format(**one))


if __name__ == "__main__":
    main()
