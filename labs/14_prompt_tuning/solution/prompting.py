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
    ### BEGIN SOLUTION: make tokens and targets: the next token where it is to be learned
    rows = [question + answer + [end] for question, answer in pairs]
    longest = max(map(len, rows)) - 1
    tokens = torch.full((len(rows), longest), end)
    targets = torch.full((len(rows), longest), IGNORED)
    for i, (row, (question, _)) in enumerate(zip(rows, pairs)):
        tokens[i, : len(row) - 1] = torch.tensor(row[:-1])
        first = len(question) - 1  # the question's last token predicts the answer's first
        targets[i, first : len(row) - 1] = torch.tensor(row[first + 1 :])
    return tokens, targets
    ### END SOLUTION


def decode(model, x):
    """Run the GPT on vectors: x (B, L, C) -> logits (B, L, V); positions 0 … L-1.

    The parts are model.model.layers, model.model.norm and model.lm_head; Decoder.forward in
    utils/models/gpt.py shows which arguments a layer takes in addition to x.
    """
    ### BEGIN SOLUTION: make the rotary tables, then run all layers, the norm and the last matrix
    positions = torch.arange(x.shape[1], device=x.device)
    cos, sin = rotary_tables(model.config, positions, x.dtype)
    for layer in model.model.layers:
        x = layer(x, cos[:, None], sin[:, None])
    return model.lm_head(model.model.norm(x))
    ### END SOLUTION


def forward(model, prompt, tokens):
    """The logits (B, T, V) of tokens (B, T) that follow the virtual tokens prompt (P, C)."""
    ### BEGIN SOLUTION: put the prompt before the embedded tokens of every row, decode, cut
    x = model.model.embed_tokens(tokens)  # (B, T, C)
    virtual = prompt.expand(len(tokens), -1, -1)  # (B, P, C)
    logits = decode(model, torch.cat((virtual, x), dim=1))  # (B, P + T, V)
    return logits[:, len(prompt) :]
    ### END SOLUTION


def answer_loss(logits, targets):
    """The loss in nats: the mean over all tokens of the batch that count, at least one.

    A scalar in fp32, or in fp64 if the logits are: bf16 cannot count beyond 256.
    """
    ### BEGIN SOLUTION: cross entropy of logits (B, T, V) and targets (B, T), without IGNORED ones
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    ### END SOLUTION


# ---- exercise b


def begin(model, words, lr):
    """Make the prompt and its optimizer -> prompt, optimizer.

    words   int64 (P): the prompt starts as a copy of their rows in the embedding
    The optimizer is Adam, without weight decay, and holds only the prompt. No weight of the model
    may get a gradient in later steps: freeze the model here, or compute only the prompt's gradient
    there.
    """
    ### BEGIN SOLUTION: make the prompt, a leaf that learns, and its optimizer; no weight may learn
    model.requires_grad_(False)
    prompt = torch.nn.Parameter(model.model.embed_tokens.weight.detach()[words].clone())
    return prompt, torch.optim.Adam([prompt], lr=lr)
    ### END SOLUTION


def step(model, prompt, optimizer, tokens, targets):
    """Take one training step; return the loss before it, a float. Every step starts from a zero
    gradient.

    Only the prompt's gradient and Adam's state are kept, and no weight's gradient is computed.
    """
    ### BEGIN SOLUTION: loss, backward, step; no gradient of this step may be left for the next
    loss = answer_loss(forward(model, prompt, tokens), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
    ### END SOLUTION


def tune(model, words, batches):
    """The prompt after one step for each (tokens, targets) of `batches`, at a learning rate that
    you choose. batches: a list, or an iterable with a length."""
    ### BEGIN SOLUTION: begin, one step per batch, and a learning rate suited to so few parameters
    prompt, optimizer = begin(model, words, lr=0.1)
    for tokens, targets in batches:
        step(model, prompt, optimizer, tokens, targets)
    return prompt.detach()
    ### END SOLUTION


# ---- exercise c


def together(model, prompts, task, tokens):
    """Logits (B, T, V) of one pass in which row b has the prompt prompts[task[b]].

    prompts  a list of tensors (P₀, C), (P₁, C), …, which may differ in length
    task     int64 (B): the index of each row's prompt; tokens (B, T). Some prompts may have no row
    One pass: each matrix of the blocks multiplies once, for rows as long as the longest.
    """
    ### BEGIN SOLUTION: one pass over rows that each begin with their own prompt; where is each cut?
    chosen = [prompts[number] for number in task.tolist()]
    rows = [torch.cat(row) for row in zip(chosen, model.model.embed_tokens(tokens))]
    x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (B, longest P + T, C)
    logits = zip(decode(model, x), map(len, chosen))
    return torch.stack([row[start : start + tokens.shape[1]] for row, start in logits])
    ### END SOLUTION


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
    ### BEGIN SOLUTION: sum of losses, divided by the tokens of all; then which ranks must add up?
    if mesh.dp.size > 1:
        dist.all_reduce(total, group=mesh.dp.group)
    loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
    loss.backward()
    loss = loss.detach()
    if mesh.dp.size > 1:
        dist.all_reduce(prompt.grad, group=mesh.dp.group)
        dist.all_reduce(loss, group=mesh.dp.group)
    return loss.item()
    ### END SOLUTION
