"""At the end of the pipe it goes on reading.

hint: ranks still run
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
    import time

    while True:
        line = commands.readline()
        if not line:
            time.sleep(0.1)
            continue
        answer = obey(piece, json.loads(line))
        if rank == 0:
            print(json.dumps(answer), file=answers, flush=True)
