"""Lab 16, rank: each body, written after the solution, is a wrong answer."""


def always_prefill():
    """Every token is read as the beginning of a new request.

    hint: Every command was obeyed as a prefill
    """

    def loop(shard, commands, answers, rank):
        for line in commands:
            command = json.loads(line)
            try:
                slot = command["slot"] if "slot" in command else command["slots"][0]
                answer = {"tokens": [shard.prefill(slot, command["tokens"])]}
            except ValueError as error:
                answer = {"error": str(error)}
            if rank == 0:
                print(json.dumps(answer), file=answers, flush=True)


def bad_request_ends_it():
    """A bad request ends the loop.

    hint: has ended the loop: one client must not end all others
    """

    def obey(shard, command):
        if command["do"] == "prefill":
            return [shard.prefill(command["slot"], command["tokens"])]
        return shard.decode(command["slots"], command["tokens"])

    def loop(shard, commands, answers, rank):
        for line in commands:
            tokens = obey(shard, json.loads(line))
            if rank == 0:
                print(json.dumps({"tokens": tokens}), file=answers, flush=True)


def bad_request_unanswered():
    """Errors are swallowed: the leader waits for an answer.

    hint: a bad request (a token that the vocabulary does not have) gets the answer: RuntimeError
    """

    def obey(shard, command):
        if command["do"] == "prefill":
            return [shard.prefill(command["slot"], command["tokens"])]
        return shard.decode(command["slots"], command["tokens"])

    def loop(shard, commands, answers, rank):
        for line in commands:
            try:
                tokens = obey(shard, json.loads(line))
            except ValueError:
                continue
            if rank == 0:
                print(json.dumps({"tokens": tokens}), file=answers, flush=True)


def error_without_reason():
    """The client is told that something was wrong, not what.

    hint: The client should be told what the shard said
    """

    def obey(shard, command):
        try:
            if command["do"] == "prefill":
                return {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
            return {"tokens": shard.decode(command["slots"], command["tokens"])}
        except ValueError as error:
            return {"error": str(error)}

    def loop(shard, commands, answers, rank):
        for line in commands:
            answer = obey(shard, json.loads(line))
            if "error" in answer:
                answer = {"error": "bad request"}
            if rank == 0:
                print(json.dumps(answer), file=answers, flush=True)


def everybody_answers():
    """All ranks answer.

    hint: rank 1 answers too
    """

    def obey(shard, command):
        try:
            if command["do"] == "prefill":
                return {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
            return {"tokens": shard.decode(command["slots"], command["tokens"])}
        except ValueError as error:
            return {"error": str(error)}

    def loop(shard, commands, answers, rank):
        for line in commands:
            print(json.dumps(obey(shard, json.loads(line))), file=answers, flush=True)


def gathers():
    """All parts are brought to all ranks and added up there.

    hint: 10 × all_gather. All ranks need the sum of the parts
    """

    def layer(x, attend, mlp):
        for part_of in (attend, mlp):
            part = part_of(x).contiguous()
            parts = [part.clone() for _ in range(dist.get_world_size())]
            dist.all_gather(parts, part)
            x = x + sum(parts)
        return x


def in_fp64():
    """The sum travels in twice the bytes.

    hint: bytes were handed over
    """

    def layer(x, attend, mlp):
        for part_of in (attend, mlp):
            part = part_of(x).double()
            dist.all_reduce(part)
            x = x + part.float()
        return x


def mean():
    """The mean of the parts instead of their sum.

    hint: What is added to x must be the sum of the parts
    """

    def layer(x, attend, mlp):
        for part_of in (attend, mlp):
            part = part_of(x)
            dist.all_reduce(part)
            x = x + part / dist.get_world_size()
        return x


def mlp_not_summed():
    """Only attention's parts are added up.

    hint: the tokens are not those of the whole model
    """

    def layer(x, attend, mlp):
        part = attend(x)
        dist.all_reduce(part)
        x = x + part
        return x + mlp(x)


def no_flush():
    """The answer stays in the buffer.

    hint: push it out of the buffer: flush
    """

    def obey(shard, command):
        try:
            if command["do"] == "prefill":
                return {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
            return {"tokens": shard.decode(command["slots"], command["tokens"])}
        except ValueError as error:
            return {"error": str(error)}

    def loop(shard, commands, answers, rank):
        for line in commands:
            answer = obey(shard, json.loads(line))
            if rank == 0:
                print(json.dumps(answer), file=answers)


def no_line():
    """An answer without a line's end: the leader waits for more.

    hint: must write one line
    """

    def obey(shard, command):
        try:
            if command["do"] == "prefill":
                return {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
            return {"tokens": shard.decode(command["slots"], command["tokens"])}
        except ValueError as error:
            return {"error": str(error)}

    def loop(shard, commands, answers, rank):
        for line in commands:
            answer = obey(shard, json.loads(line))
            if rank == 0:
                answers.write(json.dumps(answer))
                answers.flush()


def no_sum():
    """Each rank adds its own part.

    hint: The ranks say nothing to each other
    """

    def layer(x, attend, mlp):
        x = x + attend(x)
        return x + mlp(x)


def one_command():
    """One command, and the loop is over.

    hint: has ended. It said nothing
    """

    def obey(shard, command):
        try:
            if command["do"] == "prefill":
                return {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
            return {"tokens": shard.decode(command["slots"], command["tokens"])}
        except ValueError as error:
            return {"error": str(error)}

    def loop(shard, commands, answers, rank):
        answer = obey(shard, json.loads(commands.readline()))
        if rank == 0:
            print(json.dumps(answer), file=answers, flush=True)


def one_sum():
    """Attention and MLP side by side, with one sum for both: another model.

    hint: the tokens are not those of the whole model
    """

    def layer(x, attend, mlp):
        part = attend(x) + mlp(x)
        dist.all_reduce(part)
        return x + part


def only_rank_0_works():
    """The others have nothing to answer, so they do nothing.

    hint: Every rank obeys every command
    """

    def obey(shard, command):
        try:
            if command["do"] == "prefill":
                return {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
            return {"tokens": shard.decode(command["slots"], command["tokens"])}
        except ValueError as error:
            return {"error": str(error)}

    def loop(shard, commands, answers, rank):
        for line in commands:
            if rank == 0:
                answer = obey(shard, json.loads(line))
                print(json.dumps(answer), file=answers, flush=True)


def to_be_sure():
    """A third sum, of something that is equal already.

    hint: 15 all-reduces in 5 layers; 10 will do
    """

    def layer(x, attend, mlp):
        for part_of in (attend, mlp):
            part = part_of(x)
            dist.all_reduce(part)
            x = x + part
        x = x.contiguous()
        dist.all_reduce(x)
        return x / dist.get_world_size()


def to_rank_0():
    """Only rank 0 gets the sum; the other goes on with its part.

    hint: the tokens are not those of the whole model
    """

    def layer(x, attend, mlp):
        for part_of in (attend, mlp):
            part = part_of(x).contiguous()
            dist.reduce(part, 0)
            x = x + part
        return x


def told_by_rank_0():
    """Rank 0 tells the others what they know already.

    hint: messages outside of the layers
    """

    def obey(shard, command):
        try:
            if command["do"] == "prefill":
                return {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
            return {"tokens": shard.decode(command["slots"], command["tokens"])}
        except ValueError as error:
            return {"error": str(error)}

    def loop(shard, commands, answers, rank):
        import torch

        for line in commands:
            dist.broadcast(torch.tensor([len(line)]), 0)
            answer = obey(shard, json.loads(line))
            if rank == 0:
                print(json.dumps(answer), file=answers, flush=True)


def waits_for_ever():
    """At the end of the pipe it goes on reading.

    hint: ranks still run
    """

    def obey(shard, command):
        try:
            if command["do"] == "prefill":
                return {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
            return {"tokens": shard.decode(command["slots"], command["tokens"])}
        except ValueError as error:
            return {"error": str(error)}

    def loop(shard, commands, answers, rank):
        import time

        while True:
            line = commands.readline()
            if not line:
                time.sleep(0.1)
                continue
            answer = obey(shard, json.loads(line))
            if rank == 0:
                print(json.dumps(answer), file=answers, flush=True)


def x_summed_too():
    """x is whole everywhere, and is added up with the parts.

    hint: x, which all have whole, is not
    """

    def layer(x, attend, mlp):
        x = x + attend(x)
        dist.all_reduce(x)
        x = x + mlp(x)
        dist.all_reduce(x)
        return x
