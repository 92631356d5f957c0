"""An answer without a line's end: the leader waits for more.

hint: must write one line
"""

# ruff: noqa: F821


def obey(piece, command):
    try:
        if command["do"] == "prefill":
            return {"tokens": [piece.prefill(command["slot"], command["tokens"])]}
        return {"tokens": piece.decode(command["slots"], command["tokens"])}
    except ValueError as error:
        return {"error": str(error)}


def loop(piece, commands, answers, rank):
    for line in commands:
        answer = obey(piece, json.loads(line))
        if rank == 0:
            answers.write(json.dumps(answer))
            answers.flush()
