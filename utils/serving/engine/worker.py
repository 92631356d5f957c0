"""The processes of the ranks: each reads commands and sends answers until the leader ends.

    {"prefill": [...], "slots": [0, 3], "tokens": [17, 4], "blocks": [[3, 90]]}
      ->  {"tokens": [9, 23]}     rank 0
      ->  {}                      the others

"blocks" lists slots that get one more block of the cache; a chunk to prefill includes its own. If a
request wants them, "logprobs" accompanies the tokens, keyed by their index: {"1": [[23, -0.4],
...]}.

Both are pickles, an answer with its length in front (`ranks.py` reads and writes them): JSON would
take a noticeable part of a step of less than a millisecond. A token -1 means the one that the rank
chose last for this slot: the leader may send a step before it knows the previous step's tokens.

The first command gives the rank its setup (`ranks.py` starts it); the answer arrives when the model
is ready: {"ready": true, "blocks": 512, "ahead": 2} with the number of blocks of the cache and the
number of steps that may be in flight, or {"load_error": "...", "at": 7.2}. If there is no compiled
step (native.py), "eager" gives the reason. All ranks get the same commands, so they call the same
collectives in the same order; rank 0 has the logits and chooses the tokens.

One process, the ranks' parent, imports torch and forks them, so all start in the time of one. It
reports their process ids and their ends: {"pids": [...]}, then {"rank": 1, "status": -9} for each.

A rank ends when the pipe closes, when its parent is gone (which ends with the leader), or after
sending {"error": "...", "at": 7.2}. The time "at" is in seconds of the clock that all processes
share: the other ranks then fail too, and their answers may be read before this one.
"""

import contextlib
import datetime
import importlib.util
import json
import math
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from utils.imports import collector_at_rest
from utils.ranks.supervise import end_with
from utils.serving.engine.blocks import BLOCK, blocks_for
from utils.serving.engine.config import EngineConfig
from utils.serving.engine.scheduler import LAST, NOT_FINITE
from utils.serving.engine.version import LoadError, Version

if TYPE_CHECKING:  # it imports torch
    from utils.serving.engine.native import Library

NEEDED = (
    "torch.distributed",
    "safetensors.torch",
    "utils.serving.engine.model",
    "utils.serving.engine.native",
    "utils.serving.engine.sampling",
)


def main(ends: Sequence[Sequence[int]]) -> None:
    """Run the ranks' parent: fork a rank per (commands, answers, errors), its descriptors."""
    leader, news = os.getppid(), _own_output()
    _listen_to_nobody_else()
    with collector_at_rest():
        for name in NEEDED:
            importlib.import_module(name)
    used = [news.fileno(), *(end for three in ends for end in three)]
    pids = [_fork(three, used) for three in ends]  # before any thread
    for end in used[1:]:
        os.close(end)
    end_with(leader)
    _say(news, {"pids": pids})
    left = len(pids)
    while left:
        ended = _ended()
        for status, pid in ended:
            _say(news, {"rank": pids.index(pid), "status": status})
        left -= len(ended)


def _ended():
    """Wait for children to end: (exit status, process id) of at least one, killed ones first,
    because they may be the reason why others ended."""
    ended = [os.wait()]
    with contextlib.suppress(ChildProcessError):  # none is left
        while (more := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(more)
    return sorted((os.waitstatus_to_exitcode(status), pid) for pid, status in ended)


def _fork(ends, used):
    """Start a rank with these ends of its pipes, and return its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        for place, end in enumerate(ends):
            os.dup2(end, place)
        for end in used:
            os.close(end)
        end_with(parent)  # even if this process is stopped or in a collective then
        serve()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def serve() -> None:
    """Serve the commands of standard input."""
    answers = _own_output()
    commands = sys.stdin.buffer
    setup = pickle.load(commands)
    try:
        worker = Worker(setup)
        ready = {"ready": True, "blocks": worker.blocks, "ahead": worker.ahead}
        _answer(answers, ready | ({"eager": worker.eager} if worker.eager else {}))
        while True:
            _answer(answers, worker.step(pickle.load(commands)))
    except EOFError:  # the leader has exited
        pass
    except LoadError as error:
        _answer(answers, {"load_error": str(error), "at": time.monotonic()})
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        text = f"{type(error).__name__}: {first_line}"
        _answer(answers, {"error": text, "at": time.monotonic()})
    os._exit(0)  # without cleaning up with the other ranks, which may not respond


class Worker:
    """This rank's decoder and, on rank 0, a sampler for each slot."""

    def __init__(self, setup: dict):
        import torch

        from utils.serving.engine import sampling
        from utils.serving.engine.model import ServedDecoder

        self._sampling = sampling
        torch.set_num_threads(setup["threads"])
        version, config = Version.read(setup["folder"]), EngineConfig(**setup["config"])
        self.rank, tp = setup["rank"], version.tp
        device = _device(torch, config.device, self.rank, tp)
        names = config.dtypes(version.stored, device.type == "cpu", version.compute)
        self.blocks = config.blocks(version.model)
        if self.rank == 0 or device.type != "cpu":
            self.blocks = _blocks(torch, device, version, config)
        if tp > 1:  # on the CPU, rank 0 measured free memory before any rank allocated
            _join(setup, tp, device)
            self.blocks = _fewest(torch, self.blocks, device)
        compiled, kernels, self.eager = None, None, None
        if device.type == "cpu" and names[0] == "float32" and not config.enforce_eager:
            compiled, self.eager = library(config.start_seconds / 2, tp)
        if device.type == "cuda":
            # for half precision PyTorch prefers cuDNN's attention, which spends 50 ms on a plan for
            # each new length
            torch.backends.cuda.enable_cudnn_sdp(False)
            if not config.enforce_eager:
                kernels, self.eager = _kernels()
        self.decoder = ServedDecoder(
            version.model, version.weights(self.rank), self.rank, tp, config.max_num_seqs,
            config.length(version.model), version.prompt_tensors(), device,
            *(getattr(torch, name) for name in names), compiled, self.blocks, kernels,
        )
        self.fused = self.decoder.fused
        self.samplers = [None] * config.max_num_seqs
        self.logprobs = [None] * config.max_num_seqs  # alternatives that each slot reports
        self.last = [0] * config.max_num_seqs  # last token of each slot
        # steps that may be in flight: without the fused step, only rank 0 of several knows tokens
        self.ahead = 2 if tp == 1 or self.fused else 1
        # warm-up: a process's first pass is slow, and NCCL connects in its first collective
        self.decoder.prefill(0, 0, [0])
        if config.length(version.model) > 1:
            self.decoder.decode([0], [0])

    def step(self, command: dict) -> dict:
        """Execute a Step of the scheduler; return the tokens in the order that it expects."""
        tokens, told = [], {}
        if spoilt := command.get("spoilt"):
            self.decoder.cache.clear(spoilt)
        for piece in command["prefill"]:
            self._prefill(tokens, told, **piece)
        for slot, block in command["blocks"]:
            self.decoder.cache.assign(slot, [block], self.decoder.lengths[slot] // BLOCK)
        if command["slots"]:
            self._decode(tokens, told, command["slots"], command["tokens"])
        if self.rank != 0:
            return {}
        return {"tokens": tokens} | ({"logprobs": told} if told else {})

    def _prefill(
        self, out, told, slot, start, tokens,
        blocks=(), prompt=None, sampling=None, drawn=0, logprobs=None,
    ):
        if blocks:
            self.decoder.cache.assign(slot, blocks)
        logits = self.decoder.prefill(slot, start, tokens, prompt, logits=sampling is not None)
        if sampling is None:
            return
        self.samplers[slot] = self._sampling.Sampler(*sampling)
        self.logprobs[slot] = logprobs
        chosen = None
        if self.fused:
            last = self.decoder.lengths[slot] - 1
            chosen = self.fused.join(slot, self.samplers[slot], logits, last).tolist()
        if logits is not None and not (self.fused and self.samplers[slot].plain):
            self.samplers[slot].skip(drawn, logits.shape[-1])
        self._choose(logits, [slot], out, told, chosen)

    def _decode(self, out, told, slots, tokens):
        if self.fused:
            where = [self.decoder.lengths[slot] for slot in slots]
            for slot in slots:
                self.decoder.lengths[slot] += 1
            logits, chosen = self.fused(slots, tokens, where)
            return self._choose(logits, slots, out, told, chosen.tolist())
        known = [self.last[slot] if token == LAST else token for slot, token in zip(slots, tokens)]
        self._choose(self.decoder.decode(slots, known), slots, out, told)

    def _choose(self, logits, slots, tokens, told, chosen=None):
        """Append a token for each slot, and its log-probabilities if wanted.

        chosen   tokens of the fused step, which ignores top_k and top_p; None: choose here
        """
        samplers = [self.samplers[slot] for slot in slots]
        if chosen is None and logits is not None:
            chosen = self._sampling.sample(logits, samplers)
        elif chosen is not None and not all(sampler.plain for sampler in samplers):
            if logits is not None:
                for row, sampler in enumerate(samplers):
                    if not sampler.plain and chosen[row] != NOT_FINITE:
                        chosen[row] = sampler.choose(logits[row].float().cpu())
            self.fused.choose(slots, chosen)
        if logits is None:
            return
        for row, (slot, token) in enumerate(zip(slots, chosen)):
            self.last[slot] = max(token, 0)  # a step in flight may continue from it
            if self.logprobs[slot] is not None and token != NOT_FINITE:
                pairs = self._sampling.logprobs(logits[row], token, self.logprobs[slot])
                told[len(tokens) + row] = pairs
        tokens += chosen


def _own_output():
    """The output for messages. Other prints go to standard error, never between messages."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _say(news, message):
    news.write(json.dumps(message).encode() + b"\n")
    news.flush()


def _answer(answers, message):
    data = pickle.dumps(message)
    answers.write(len(data).to_bytes(4, "little") + data)
    answers.flush()


def _listen_to_nobody_else():
    """Ignore the signals that end all processes of a terminal: the leader decides when a rank
    ends, and lets requests finish first."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def _device(torch, wanted, rank, tp):
    """This rank's device: its own GPU, or the CPU."""
    gpus = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and gpus < tp):
        return torch.device("cpu")
    if gpus < tp:
        raise LoadError(f'{tp} ranks need {tp} GPUs, but there are {gpus}: give device="cpu"')
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def library(seconds: float, tp: int) -> tuple["Library | None", str | None]:
    """(compiled step or None, reason why not), after `seconds` at the latest. Either all ranks have
    it or none, because in a step they must call the same collectives."""
    import torch
    import torch.distributed as dist

    from utils.serving.engine import native

    found, why_not = None, None
    try:
        found = native.load(seconds)
    except native.NotCompiled as error:
        why_not = str(error)
    if tp > 1:
        have = torch.tensor(int(found is not None))
        dist.all_reduce(have, op=dist.ReduceOp.MIN)
        if not have:
            found, why_not = None, why_not or "another rank has none"
    return found, why_not


def _kernels():
    """(kernels of a decode step or None, reason why not)."""
    if importlib.util.find_spec("triton") is None:
        return None, "the Triton language is not installed"
    from utils.kernels import decode

    return decode, None


def _blocks(torch, device, version, config):
    """The number of blocks of the cache. Refuses more than memory can hold, which Linux would
    promise and then kill the process. On a GPU, without num_blocks, as many as fit."""
    model, on_cpu = version.model, device.type == "cpu"
    wanted = config.blocks(model)
    weights, cache = config.rank_bytes(model, version.tp, version.stored, on_cpu, version.compute)
    ranks, free = (version.tp, free_memory()) if on_cpu else (1, _free_on_gpu(torch, device))
    if ranks * (weights + cache) <= free:
        return wanted
    if not on_cpu and config.num_blocks is None:
        fit = int((free - weights) * wanted / cache)
        if fit >= blocks_for(config.length(model)):
            return fit
    gib = (f"{amount / 2**30:,.1f} GiB" for amount in (ranks * weights, ranks * cache, free))
    raise LoadError(
        "{} of weights and {} of keys and values exceed the {} of free memory: "
        "lower max_model_len or max_num_seqs, which are {:,} and {:,}".format(
            *gib, config.length(model), config.max_num_seqs
        )
    )


def _free_on_gpu(torch, device):
    """Free bytes, less a tenth for a step's activations."""
    return 0.9 * torch.cuda.mem_get_info(device)[0]


def _fewest(torch, blocks, device):
    """The largest number of blocks for which all ranks have room."""
    import torch.distributed as dist

    fewest = torch.tensor(blocks, device=device)
    dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
    return int(fewest)


def free_memory() -> float:
    """Free bytes of memory of this machine or of this process's container, whichever is less."""
    left = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        left.append(1024 * int(known["MemAvailable"].split()[0]))
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # there is none, or "max"
        most = int((group / "memory.max").read_text())
        left.append(most - int((group / "memory.current").read_text()))
    return min(left)


def _join(setup, tp, device):
    """The process group: NCCL between GPUs, else gloo, over the loopback interface."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"file://{setup['meeting']}",
        rank=setup["rank"],
        world_size=tp,
        timeout=datetime.timedelta(seconds=setup["seconds"]),
    )
