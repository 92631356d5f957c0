"""Errors are swallowed: the leader waits for an answer.

hint: a bad request (a token that the vocabulary does not have) gets the answer: RuntimeError
"""

# ruff: noqa: F821


def obey(piece, command):
    if command["do"] == "prefill":
        return [piece.prefill(command["slot"], command["tokens"])]
    return piece.decode(command["slots"], command["tokens"])


def loop(piece, commands, answers, rank):
    for line in commands:
        try:
            tokens = obey(piece, json.loads(line))
        except ValueError:
            continue
        if rank == 0:
            print(json.dumps({"tokens": tokens}), file=answers, flush=True)
