"""Every token is read as the beginning of a new request.

hint: Every command was obeyed as a prefill
"""

# ruff: noqa: F821


def loop(piece, commands, answers, rank):
    for line in commands:
        command = json.loads(line)
        try:
            slot = command["slot"] if "slot" in command else command["slots"][0]
            answer = {"tokens": [piece.prefill(slot, command["tokens"])]}
        except ValueError as error:
            answer = {"error": str(error)}
        if rank == 0:
            print(json.dumps(answer), file=answers, flush=True)
