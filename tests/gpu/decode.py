"""Decode steps of the engine and its peers, on random weights of 1.3 and 8 billion parameters.

A rate excludes prefill: it is computed from the time of LONG new tokens minus that of SHORT.
`of_copy` is the bandwidth at which a step reads weights, keys and values once, as a fraction of a
copy's. `predicted` is `utils.planner.decode`'s, for a card with that copy's bandwidth and a
measured peak. All use the same sizes, prompts of PROMPT tokens and greedy decoding; the environment
variable GPTFAST names a clone of gpt-fast, which needs nothing else.
"""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType

import torch

from tests.gpu.child import row_of, tried
from tests.gpu.machine import device
from tests.gpu.serving import answered
from utils.measure import timing
from utils.models.config import GPTConfig
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.planner import MACHINES, Model, kernels
from utils.planner.decode import decode_step
from utils.serving.engine.engine import Engine
from utils.serving.export import export

SIZES = {
    "1b": GPTConfig(32768, 2048, 24, 16, max_positions=2048),
    "8b": GPTConfig(  # Llama 3
        128256, 4096, 32, 32, kv_heads=8, intermediate_size=14336, max_positions=2048
    ),
    "tiny": GPTConfig(300, 64, 2, 2, max_positions=256),
}
PROMPT, SHORT, LONG = 32, 8, 136  # tokens
REQUESTS = (1, 16, 64)
DTYPES = ("bfloat16", "int8")  # of the weights; with int8, embedding and head stay in bf16


@dataclass(frozen=True)
class Task:
    """A task for all contenders, and the least cost of its step."""

    config: GPTConfig
    dtype: str  # one of DTYPES
    where: torch.device
    copy: float  # bytes/s
    peak: float  # FLOP/s in bf16
    long: int

    def prompts(self, many: int) -> list[list[int]]:
        drawn = torch.Generator().manual_seed(0)
        return torch.randint(self.config.vocab_size, (many, PROMPT), generator=drawn).tolist()

    def figures(self, rate: float, many: int) -> dict:
        """A row: `rate` is in tokens per second for all requests together."""
        model = Model.of(self.config, PROMPT + self.long)
        context = PROMPT + (SHORT + self.long) // 2
        ends = 2 * model.vocab_size * model.hidden_size  # bytes of the head, in bf16
        width = 1 if self.dtype == "int8" else 2
        weights = width * model.layers * (model.attention_matrices + model.expert_matrices) + ends
        kept = 2 * model.layers * model.key_width * 2 * many * context
        row = {"tokens_per_s": rate, "of_copy": (weights + kept) * rate / many / self.copy}
        if width == 2:  # the planner does not model int8
            machine = replace(
                MACHINES["dgx-h100"], bandwidth=self.copy / kernels.STREAM, peak=self.peak,
                sustained=1.0,
            )
            row["predicted"] = decode_step(model, machine, many, context).tokens_per_second
        return row


def run(size: str, contenders: tuple[str, ...], rehearse: bool) -> Iterator[tuple[str, dict]]:
    """A row per contender, type of the weights and number of requests."""
    where = device(rehearse)
    config = SIZES["tiny" if rehearse else size]
    copy = timing.memory_bandwidth(where, 2**22 if rehearse else 2**32)
    peak = timing.matmul_flops(256 if rehearse else 8192, torch.bfloat16, where)
    yield "model", {"parameters": config.parameter_count(), "copy": copy}
    for dtype in DTYPES:
        task = Task(config, dtype, where, copy, peak, 2 * SHORT if rehearse else LONG)
        for name in contenders:
            try:
                with CONTENDERS[name](task) as generate:
                    for many in REQUESTS[:2] if rehearse else REQUESTS:
                        yield f"{name}, {dtype}, {many}", tried(measured, task, generate, many)
            except Exception as error:  # this one does not start
                yield f"{name}, {dtype}", row_of(error)
            generate = None
            gc.collect()
            torch.cuda.empty_cache()


def measured(task: Task, generate: Callable[[list, int], None], many: int) -> dict:
    prompts, took = task.prompts(many), {}
    for count in (task.long, SHORT):  # the long one first: its static cache is reused
        generate(prompts, count)
    for count in (SHORT, task.long):
        began = time.perf_counter()
        generate(prompts, count)
        took[count] = time.perf_counter() - began
    return task.figures(many * (task.long - SHORT) / (took[task.long] - took[SHORT]), many)


# ---- the contenders: each yields generate(prompts, count), which waits for count tokens per prompt


@contextmanager
def ours(task: Task) -> Iterator[Callable]:
    with tempfile.TemporaryDirectory() as folder:
        kind = "int8" if task.dtype == "int8" else "auto"
        version = export(stored(task.config, task.where).name, folder, 1, dtype=kind)
        options = {"device": task.where.type, "max_num_seqs": max(REQUESTS), "queue": 64}
        options |= {"max_model_len": PROMPT + task.long + 16, "start_seconds": 240.0}
        with Engine(version, step_seconds=120.0, enable_prefix_caching=False, **options) as engine:

            def generate(prompts, count):
                if answered(engine, prompts, count) != count * len(prompts):
                    raise ValueError("an answer ended early")

            yield generate


@cache
def stored(config: GPTConfig, where: torch.device) -> tempfile.TemporaryDirectory:
    """A checkpoint with random weights, drawn on the device and stored in bf16."""
    folder = tempfile.TemporaryDirectory()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with where:
            GPT(config).save_pretrained(folder.name)
    finally:
        torch.set_default_dtype(torch.float32)
    Tokenizer.train(["the ranks of the mesh and their parts"] * 3, 270).save(folder.name)
    gc.collect()
    torch.cuda.empty_cache()
    return folder


def llama(task: Task, attention: str):
    """transformers' model of these sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if task.dtype == "int8":
        import torchao  # noqa: F401 (transformers quantizes with it)

    sizes = LlamaConfig(**task.config.to_hf())
    with task.where:
        model = LlamaForCausalLM._from_config(
            sizes, dtype=torch.bfloat16, attn_implementation=attention
        ).eval()
    if task.dtype == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


@contextmanager
def static_cache(task: Task) -> Iterator[Callable]:
    """transformers' generate, which compiles the decode step of a static cache on a GPU."""
    model = llama(task, "sdpa")

    def generate(prompts, count):
        ids = torch.tensor(prompts, device=task.where)
        how = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), cache_implementation="static", **how
        )
        if found.shape[1] != PROMPT + count:
            raise ValueError("an answer ended early")
        found.cpu()

    yield generate


@contextmanager
def continuous(task: Task) -> Iterator[Callable]:
    """transformers' continuous batching, with just enough room for all requests."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = llama(task, "sdpa")
    how = GenerationConfig(max_new_tokens=task.long, do_sample=False, eos_token_id=-1)
    room = ContinuousBatchingConfig(num_blocks=2 * max(REQUESTS))  # of 256 positions
    with model.continuous_batching_context_manager(how, continuous_batching_config=room) as manager:

        def generate(prompts, count):
            manager.add_requests(prompts, max_new_tokens=count)
            for _ in prompts:
                found = manager.get_result(timeout=120)
                if found is None or len(found.generated_tokens) != count:
                    raise ValueError("an answer ended early")

        yield generate


@contextmanager
def gpt_fast(task: Task) -> Iterator[Callable]:
    """Its model, and the compiled loop of its generate.py with greedy decoding."""
    clone = os.environ.get("GPTFAST")
    if not clone:
        raise ModuleNotFoundError(name="gpt-fast")
    sys.path.insert(0, os.path.abspath(os.path.expanduser(clone)))
    import model as source

    sizes = task.config
    made = source.ModelArgs(
        block_size=sizes.max_positions, vocab_size=sizes.vocab_size, n_layer=sizes.layers,
        n_head=sizes.heads, dim=sizes.hidden_size, n_local_heads=sizes.key_value_heads,
        intermediate_size=sizes.mlp_size, rope_base=sizes.rope_theta,
    )
    with task.where:
        model = source.Transformer(made).to(torch.bfloat16).eval()
    if task.dtype == "int8":
        sys.modules["tokenizer"] = ModuleType("tokenizer")  # imported, but not used
        sys.modules["tokenizer"].get_tokenizer = None
        import quantize

        handler = quantize.WeightOnlyInt8QuantHandler(model)
        whole = handler.create_quantized_state_dict()
        model = handler.convert_for_runtime()
        model.load_state_dict(whole, assign=True)
        model.to(task.where)

    def step(token, position):
        return model(token, position)[:, -1:].argmax(-1)

    eager = step
    torch._inductor.config.coordinate_descent_tuning = True

    @torch.no_grad()
    def generate(prompts, count):
        nonlocal step
        with task.where:
            if model.max_batch_size != len(prompts):  # caches and code for this number of requests
                model.max_batch_size = -1
                model.setup_caches(len(prompts), PROMPT + task.long)
                if task.where.type == "cuda":
                    torch.compiler.reset()
                    step = torch.compile(eager, mode="reduce-overhead", fullgraph=True)
            token = model(torch.tensor(prompts), torch.arange(PROMPT))[:, -1:].argmax(-1)
            position = torch.tensor([PROMPT])
            for _ in range(count - 1):
                token = step(token, position).clone()
                position += 1
        token.cpu()

    yield generate


CONTENDERS = {
    "ours": ours,
    "transformers, static cache": static_cache,
    "gpt-fast": gpt_fast,
    "transformers, continuous": continuous,
}


def part(size: str, *contenders: str) -> Callable[[bool], Iterator[tuple[str, dict]]]:
    return lambda rehearse: run(size, contenders, rehearse)


THEIRS = "transformers, static cache", "transformers, continuous"
ours_1b, ours_8b = part("1b", "ours"), part("8b", "ours")
transformers_1b, transformers_8b = part("1b", *THEIRS), part("8b", *THEIRS)
gpt_fast_1b, gpt_fast_8b = part("1b", "gpt-fast"), part("8b", "gpt-fast")
