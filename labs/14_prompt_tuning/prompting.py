"""Lab 14: prompt tuning by hand. The model is frozen; what learns stands before its words.

    tokens, targets = batch(pairs, end)               # a: rows of one length, and what counts
    logits = forward(model, prompt, tokens)           # a: virtual tokens in front, cut off again
    loss = answer_loss(logits, targets)               # a
    prompt, optimizer = begin(model, words, lr)       # b: the only thing that learns
    loss = step(model, prompt, optimizer, tokens, targets)
    prompt = tune(model, words, batches)              # b
    logits = together(model, prompts, task, tokens)   # c: each row with a prompt of its own
    loss = backward(model, prompt, tokens, targets, mesh)   # d: on several ranks

B rows of T tokens, P virtual tokens, C the hidden size, V words. A prompt is (P, C), of the model's
type: fp64, fp32 or bf16. Others use the model and the inputs too: no function changes them, but
that `begin` may freeze the model, and `step` moves the prompt; nothing is kept from call to call.
`utils.prompts` is what you build here, so it is not used.
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

    A row is question + answer + [end]. tokens holds all of it but its last; targets[t] is the
    token after tokens[t] where that belongs to the answer or is the end, IGNORED elsewhere.
    Shorter rows are filled up on the right: tokens with `end`, targets with IGNORED. A question has
    a token at least, an answer may be empty; `end` may occur in both.
    """
    raise NotImplementedError(
        "make tokens and targets: what follows each token, where it is to be learned"
    )


def decode(model, x):
    """What the GPT makes of vectors: x (B, L, C) -> logits (B, L, V); positions 0 … L-1.

    The parts are model.model.layers, model.model.norm and model.lm_head; utils/models/gpt.py shows
    in Decoder.forward what a layer wants besides x.
    """
    raise NotImplementedError(
        "make the rotary tables, then all layers, the norm and the last matrix"
    )


def forward(model, prompt, tokens):
    """The logits (B, T, V) of tokens (B, T) that stand behind the virtual tokens prompt (P, C)."""
    raise NotImplementedError("put the prompt before the embedded tokens of every row, decode, cut")


def answer_loss(logits, targets):
    """The loss in nats: the mean over all tokens of the batch that count, one at least.

    A number in fp32, in fp64 where the logits are: in bf16 one cannot count beyond 256.
    """
    raise NotImplementedError(
        "cross entropy of logits (B, T, V) and targets (B, T), IGNORED ones left out"
    )


# ---- exercise b


def begin(model, words, lr):
    """What learns, and what makes it learn -> prompt, optimizer.

    words   int64 (P): the prompt starts as a copy of their rows in the embedding
    The optimizer is Adam, without weight decay, and knows nothing but the prompt. No weight of the
    model may get a gradient in the steps to come: freeze it here, or ask for the gradient of the
    prompt alone there.
    """
    raise NotImplementedError(
        "make the prompt, a leaf that learns, and its optimizer; no weight may learn"
    )


def step(model, prompt, optimizer, tokens, targets):
    """One training step; the loss before it, a float. Every step starts from a gradient of zero.

    Nothing but the prompt's gradient and Adam's state is kept, and no gradient of a weight is made.
    """
    raise NotImplementedError(
        "loss, backward, step; no gradient of this step may be left for the next"
    )


def tune(model, words, batches):
    """The prompt after one step for each (tokens, targets) of `batches`, at a learning rate that
    you choose. batches: a list, or what has a length and is gone through like one."""
    raise NotImplementedError(
        "begin, one step for each batch, and a learning rate fit for so few numbers"
    )


# ---- exercise c


def together(model, prompts, task, tokens):
    """Logits (B, T, V) of one pass in which row b has the prompt prompts[task[b]].

    prompts  a list of tensors (P₀, C), (P₁, C), …: they may differ in length
    task     int64 (B): which one each row has; tokens (B, T). Some prompts may have no row
    One pass: each matrix of the blocks multiplies once, for rows as long as the longest.
    """
    raise NotImplementedError(
        "one pass over rows that each begin with their own prompt; where to cut each?"
    )


# ---- exercise d


def backward(model, prompt, tokens, targets, mesh):
    """Sets prompt.grad on every rank to what one rank would find with the rows of all; returns the
    loss of all rows, a float.

    mesh.tp   these ranks share each matrix, and have the same rows
    mesh.dp   these have other rows, whose answers are of other lengths; on some no token may
              count. Each has a whole copy of the model (of its part of the matrices, where tp
              ranks share them)
    The model is frozen. The prompt is on every rank, and prompt.grad is None before; afterwards it
    is the same on all, bit by bit. Three all-reduces over dp at most, of the prompt's
    gradient in its own type (bf16 may travel as fp32) and of single numbers; none over tp.
    """
    total = (targets != IGNORED).sum().float()  # tokens that count on this rank
    losses = loss_function(model)  # fits logits that are split over the tp ranks, and whole ones
    raise NotImplementedError(
        "the sum of the losses, divided by the tokens of all; then who must add up?"
    )
