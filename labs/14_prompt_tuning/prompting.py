"""Lab 14: prompt tuning by hand. The model is frozen; only virtual tokens before its words learn.

    tokens, targets = batch(pairs, end)               # a: rows of one length, and what counts
    logits = forward(model, prompt, tokens)           # a: virtual tokens in front, cut off again
    loss = answer_loss(logits, targets)               # a
    prompt, optimizer = begin(model, words, lr)       # b: only the prompt learns
    loss = step(model, prompt, optimizer, tokens, targets)
    prompt = tune(model, words, batches)              # b
    logits = together(model, prompts, task, tokens)   # c: each row with a prompt of its own
    loss = backward(model, prompt, tokens, targets, mesh)   # d: on several ranks

B rows of T tokens, P virtual tokens, C the hidden size, V words. A prompt is (P, C), of the model's
type: fp64, fp32 or bf16. Others use the model and the inputs too: no function changes them, except
that `begin` may freeze the model, and `step` updates the prompt; nothing is kept between calls. Do
not use `utils.prompts`: it is what you are building.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from utils.models.gpt import rotary_tables
from utils.parallel.tensor import loss_function

IGNORED = -100  # a target that does not count, as in torch's cross_entropy


# ---- exercise a


def batch(pairs, end):
    """pairs: [(question, answer), …], each a list of token ids -> tokens, targets, int64 (B, T).

    A row is question + answer + [end]. tokens holds all but the last of these; targets[t] is the
    token after tokens[t] if that belongs to the answer or is the end, and IGNORED elsewhere.
    Shorter rows are padded on the right: tokens with `end`, targets with IGNORED. A question has at
    least one token, an answer may be empty; `end` may occur in both.
    """
    raise NotImplementedError("make tokens and targets: the next token where it is to be learned")


def decode(model, x):
    """Run the GPT on vectors: x (B, L, C) -> logits (B, L, V); positions 0 … L-1.

    The parts are model.model.layers, model.model.norm and model.lm_head; Decoder.forward in
    utils/models/gpt.py shows which arguments a layer takes in addition to x.
    """
    raise NotImplementedError(
        "make the rotary tables, then run all layers, the norm and the last matrix"
    )


def forward(model, prompt, tokens):
    """The logits (B, T, V) of tokens (B, T) that follow the virtual tokens prompt (P, C)."""
    raise NotImplementedError("put the prompt before the embedded tokens of every row, decode, cut")


def answer_loss(logits, targets):
    """The loss in nats: the mean over all tokens of the batch that count, at least one.

    A scalar in fp32, or in fp64 if the logits are: bf16 cannot count beyond 256.
    """
    raise NotImplementedError(
        "cross entropy of logits (B, T, V) and targets (B, T), without IGNORED ones"
    )


# ---- exercise b


def begin(model, words, lr):
    """Make the prompt and its optimizer -> prompt, optimizer.

    words   int64 (P): the prompt starts as a copy of their rows in the embedding
    The optimizer is Adam, without weight decay, and holds only the prompt. No weight of the model
    may get a gradient in later steps: freeze the model here, or compute only the prompt's gradient
    there.
    """
    raise NotImplementedError(
        "make the prompt, a leaf that learns, and its optimizer; no weight may learn"
    )


def step(model, prompt, optimizer, tokens, targets):
    """Take one training step; return the loss before it, a float. Every step starts from a zero
    gradient.

    Only the prompt's gradient and Adam's state are kept, and no weight's gradient is computed.
    """
    raise NotImplementedError(
        "loss, backward, step; no gradient of this step may be left for the next"
    )


def tune(model, words, batches):
    """The prompt after one step for each (tokens, targets) of `batches`, at a learning rate that
    you choose. batches: a list, or an iterable with a length."""
    raise NotImplementedError(
        "begin, one step per batch, and a learning rate suited to so few parameters"
    )


# ---- exercise c


def together(model, prompts, task, tokens):
    """Logits (B, T, V) of one pass in which row b has the prompt prompts[task[b]].

    prompts  a list of tensors (P₀, C), (P₁, C), …, which may differ in length
    task     int64 (B): the index of each row's prompt; tokens (B, T). Some prompts may have no row
    One pass: each matrix of the blocks multiplies once, for rows as long as the longest.
    """
    raise NotImplementedError(
        "one pass over rows that each begin with their own prompt; where is each cut?"
    )


# ---- exercise d


def backward(model, prompt, tokens, targets, mesh):
    """Set prompt.grad on every rank to the gradient that one rank would compute with all rows;
    return the loss over all rows, a float.

    mesh.tp   these ranks split each matrix, and have the same rows
    mesh.dp   these have different rows, with answers of different lengths; on some, no token may
              count. Each has a full copy of the model (or of its shards, if tp ranks split it)
    The model is frozen. The prompt is on every rank, and prompt.grad is None before; afterwards it
    has the same bits on all. At most three all-reduces over dp, of the prompt's gradient in its own
    type (bf16 may be sent as fp32) and of single values; none over tp.
    """
    total = (targets != IGNORED).sum().float()  # tokens that count on this rank
    losses = loss_function(model)  # for logits split over the tp ranks, and for full ones
    raise NotImplementedError(
        "sum of losses, divided by the tokens of all; then which ranks must add up?"
    )
