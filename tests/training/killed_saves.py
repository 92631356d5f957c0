"""Kill saves repeatedly:  python -m tests.training.killed_saves FOLDER FORM N

N times, ranks that do nothing but save (one for FORM whole, two for FORM sharded) get SIGKILL at a
random moment, three times out of four after they have begun; of two ranks, either or both get it
first. The newest checkpoint must then be undamaged and no older than the last save that returned.
Prints {"kills", "saves", "in_a_save"}; in_a_save counts the kills that left a partial checkpoint.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from utils.models.config import GPTConfig
from utils.models.gpt import GPT
from utils.training import checkpoint
from utils.training.run_folder import RunFolder, checkpoints, newest

MODEL = GPTConfig(vocab_size=61, hidden_size=24, layers=2, heads=4, kv_heads=2)
SHAPES = {name: tuple(p.shape) for name, p in GPT.without_memory(MODEL).named_parameters()}


def tensors(step, rank=0, ranks=1):
    """Return {name: (this rank's rows, their offset)}; every value equals the step."""
    found = {}
    for name, shape in SHAPES.items():
        first, stop = (shape[0] * r // ranks for r in (rank, rank + 1))
        piece = torch.full((stop - first, *shape[1:]), float(step))
        found[name] = piece, (first, *(0 for _ in shape[1:]))
    return found


def save_for_ever(folder, form, rank, store, begun, reports):
    """Save in a loop on one rank; report its start and, in the foreground, every saved step."""
    sharded = form == "sharded"
    if sharded:
        address = dist.TCPStore("127.0.0.1", store, is_master=False, use_libuv=True)
        dist.init_process_group("gloo", store=address, rank=rank, world_size=2)
    model = GPT.without_memory(MODEL)
    background = random.random() < 0.5
    run = RunFolder(folder, keep=2, rank=rank, background=background)
    step = int(run.found[0].name.rsplit("-", 1)[1]) if run.found else 0
    with run.opened(step):
        if sharded:  # both look for checkpoints before either writes
            dist.barrier()
        os.write(begun, b".")
        while True:
            step += 1
            record = {"step": step, "optimizer": "none"}
            if sharded:
                pieces = tensors(step, rank, 2)
                checkpoint.save_pieces(run, model, pieces, {}, record)
            else:
                pairs = [(name, piece) for name, (piece, _) in tensors(step).items()]
                checkpoint.save_whole(run, model, pairs, [], record)
            if not background and rank == 0:
                os.write(reports, step.to_bytes(4, "big"))


def one_kill(folder, form):
    """Return (last reported step, whether a partial checkpoint is left)."""
    read, write = os.pipe()
    begun, begins = os.pipe()
    ranks = 2 if form == "sharded" else 1
    store = None
    if ranks == 2:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            try:
                save_for_ever(folder, form, rank, store and store.port, begins, write)
            except BaseException:  # the other rank was killed
                pass
            finally:
                os._exit(1)
        children.append(pid)
    os.close(write)
    os.close(begins)
    if random.random() < 0.75:
        for _ in children:
            os.read(begun, 1)
    time.sleep(random.uniform(0.0, 0.1))
    for pid in random.sample(children, random.randint(1, ranks)):
        os.kill(pid, signal.SIGKILL)
    time.sleep(random.choice([0.0, 0.01]))  # a surviving rank may notice first
    left = any(path.name.endswith(".partial") for path in Path(folder).glob(".checkpoint*"))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    reported = b""
    while more := os.read(read, 65536):
        reported += more
    os.close(read)
    os.close(begun)
    return int.from_bytes(reported[-4:], "big"), left


def check(folder, returned):
    """Assert that the newest checkpoint is complete and no older than the step `returned`."""
    found = checkpoints(folder)
    assert found or not returned, f"step {returned} was saved, but no checkpoint is there"
    if not found:
        return 0
    taken = newest(folder)
    assert taken == found[0], f"{found[0]} is damaged"
    step = checkpoint.read_run(taken)["step"]
    assert step >= returned, f"step {returned} was saved, but step {step} is there"
    seen = {}
    checkpoint.hand_out(taken, seen.__setitem__)
    assert {name: tuple(tensor.shape) for name, tensor in seen.items()} == SHAPES
    assert all((tensor == step).all() for tensor in seen.values()), f"step {step} is mixed"
    return step


def main():
    folder, form, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
    random.seed(kills)
    torch.set_num_threads(1)
    last, in_a_save = 0, 0
    for _ in range(kills):
        returned, left = one_kill(folder, form)
        step = check(folder, max(returned, last))
        last, in_a_save = step, in_a_save + left
    print(json.dumps({"kills": kills, "saves": last, "in_a_save": in_a_save}))


if __name__ == "__main__":
    main()
