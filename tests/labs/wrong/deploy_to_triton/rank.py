"""Lab 16, rank: each body, written after the solution, is a wrong answer."""


def always_prefill():
    """Every token is read as the beginning of a new request.

    kind: constants
    hint: and the shard was asked for prefill(
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

    kind: odd
    hint: ValueError in rank.py
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

    kind: part
    hint: has no answer | has not come
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

    kind: part
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

    kind: communication
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

    kind: communication
    hint: this rank calls all_gather
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

    kind: communication
    hint: all_reduce 2 times (
    """

    def layer(x, attend, mlp):
        for part_of in (attend, mlp):
            part = part_of(x).double()
            dist.all_reduce(part)
            x = x + part.float()
        return x


def mean():
    """The mean of the parts instead of their sum.

    kind: values
    hint: These are the means of the parts
    """

    def layer(x, attend, mlp):
        for part_of in (attend, mlp):
            part = part_of(x)
            dist.all_reduce(part)
            x = x + part / dist.get_world_size()
        return x


def mlp_not_summed():
    """Only attention's parts are added up.

    kind: part
    hint: The parts of the MLP are not added up
    """

    def layer(x, attend, mlp):
        part = attend(x)
        dist.all_reduce(part)
        x = x + part
        return x + mlp(x)


def no_flush():
    """The answer stays in the buffer.

    kind: luck
    hint: pushes it out of the buffer: flush
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

    kind: part
    hint: has no answer | has not come
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

    kind: values
    hint: These are this rank's own parts
    """

    def layer(x, attend, mlp):
        x = x + attend(x)
        return x + mlp(x)


def one_command():
    """One command, and the loop is over.

    kind: part
    hint: was not obeyed
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

    kind: values
    hint: The MLP is given x without what attention has added to it
    """

    def layer(x, attend, mlp):
        part = attend(x) + mlp(x)
        dist.all_reduce(part)
        return x + part


def only_rank_0_works():
    """The others have nothing to answer, so they do nothing.

    kind: step
    hint: Does every rank obey every command | was not obeyed
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

    kind: communication
    hint: all_reduce 3 times
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

    kind: communication
    hint: this rank calls reduce | do not hold the same bits | the sum of all ranks | own parts
    """

    def layer(x, attend, mlp):
        for part_of in (attend, mlp):
            part = part_of(x).contiguous()
            dist.reduce(part, 0)
            x = x + part
        return x


def told_by_rank_0():
    """Rank 0 tells the others what they know already.

    kind: communication
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

    kind: end
    hint: an endless loop?
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

    kind: values
    hint: x, which all ranks have whole, is added up with the parts
    """

    def layer(x, attend, mlp):
        x = x + attend(x)
        dist.all_reduce(x)
        x = x + mlp(x)
        dist.all_reduce(x)
        return x


def answers_by_hand():
    """The line is put together by hand: a reason with quotes is no JSON.

    kind: values
    hint: no JSON object
    """

    def loop(shard, commands, answers, rank):
        for line in commands:
            command = json.loads(line)
            try:
                if command["do"] == "prefill":
                    said = f'"tokens": [{shard.prefill(command["slot"], command["tokens"])}]'
                else:
                    said = f'"tokens": {shard.decode(command["slots"], command["tokens"])}'
            except ValueError as error:
                said = f'"error": "{error}"'
            if rank == 0:
                print("{" + said + "}", file=answers, flush=True)


def any_exception():
    """Whatever is raised is answered, also that the other ranks have gone.

    kind: odd
    hint: any other exception ends the loop
    """

    def loop(shard, commands, answers, rank):
        for line in commands:
            command = json.loads(line)
            try:
                if command["do"] == "prefill":
                    answer = {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
                else:
                    answer = {"tokens": shard.decode(command["slots"], command["tokens"])}
            except Exception as error:
                answer = {"error": str(error)}
            if rank == 0:
                print(json.dumps(answer), file=answers, flush=True)


def asks_the_others():
    """A barrier before each command, so that all begin together.

    kind: communication
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
        for line in commands:
            dist.barrier()
            answer = obey(shard, json.loads(line))
            if rank == 0:
                print(json.dumps(answer), file=answers, flush=True)


def copy_of_the_shard():
    """A copy of the shard, in case that a request spoils it.

    kind: memory
    hint: Is there a second copy of them?
    """

    import copy

    def obey(shard, command):
        try:
            if command["do"] == "prefill":
                return {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
            return {"tokens": shard.decode(command["slots"], command["tokens"])}
        except ValueError as error:
            return {"error": str(error)}

    def loop(shard, commands, answers, rank):
        spare = copy.deepcopy(getattr(shard, "decoder", None))
        for line in commands:
            answer = obey(shard, json.loads(line))
            if rank == 0:
                print(json.dumps(answer), file=answers, flush=True)
        del spare


def fp32_alone():
    """Parts are summed up in fp32, whatever x is.

    kind: types
    hint: x after the layer
    """

    def layer(x, attend, mlp):
        for part_of in (attend, mlp):
            part = part_of(x).float()
            dist.all_reduce(part)
            x = x + part.to(x.dtype)
        return x


def history():
    """What came out of each layer is kept.

    kind: memory
    hint: are still held when the caller has let go of all of them
    """

    right, outputs = layer, []

    def layer(x, attend, mlp):
        outputs.append(right(x, attend, mlp))
        return outputs[-1]


def into_x():
    """The sums are added into x itself, which belongs to the caller.

    kind: inputs
    hint: x is not what it was before the call
    """

    def layer(x, attend, mlp):
        for part_of in (attend, mlp):
            part = part_of(x)
            dist.all_reduce(part)
            x += part
        return x


def neighbours_only():
    """With two ranks it is enough to swap parts.

    kind: sizes
    hint: this rank calls
    """

    def layer(x, attend, mlp):
        import torch

        size, rank = dist.get_world_size(), dist.get_rank()
        for part_of in (attend, mlp):
            part = part_of(x)
            if size > 1:
                got = torch.empty_like(part)
                other = dist.isend(part, (rank + 1) % size)
                dist.recv(got, (rank - 1) % size)
                other.wait()
                part = part + got
            x = x + part
        return x


def nothing_to_add():
    """A rank whose part is nothing but zeros has nothing to say.

    kind: odd
    hint: a message does not fit where it is received | call the same collectives
    """

    def layer(x, attend, mlp):
        for part_of in (attend, mlp):
            part = part_of(x)
            if part.count_nonzero():
                dist.all_reduce(part)
            x = x + part
        return x


def one_buffer():
    """A buffer is kept for the parts, made for the first shape.

    kind: constants
    hint: are still held | RuntimeError | x after the layer | this rank calls
    """

    buffers = {}

    def layer(x, attend, mlp):
        import torch

        for part_of in (attend, mlp):
            part = part_of(x)
            rows = x.shape[0] * x.shape[1]
            buffer = buffers.setdefault(x.shape[-1], torch.zeros(4096, x.shape[-1], dtype=x.dtype))
            buffer[:rows] = part.flatten(0, 1)
            dist.all_reduce(buffer[:rows])
            x = x + buffer[:rows].view_as(x)
        return x


def one_row_at_a_time():
    """Each request of a decode is decoded alone.

    kind: work
    hint: and the shard was asked for decode(
    """

    def loop(shard, commands, answers, rank):
        for line in commands:
            command = json.loads(line)
            try:
                if command["do"] == "prefill":
                    tokens = [shard.prefill(command["slot"], command["tokens"])]
                else:
                    pairs = zip(command["slots"], command["tokens"])
                    tokens = [shard.decode([slot], [token])[0] for slot, token in pairs]
                answer = {"tokens": tokens}
            except ValueError as error:
                answer = {"error": str(error)}
            if rank == 0:
                print(json.dumps(answer), file=answers, flush=True)


def reads_all_first():
    """All commands are read, then they are obeyed.

    kind: luck
    hint: was not obeyed | has no answer
    """

    def obey(shard, command):
        try:
            if command["do"] == "prefill":
                return {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
            return {"tokens": shard.decode(command["slots"], command["tokens"])}
        except ValueError as error:
            return {"error": str(error)}

    def loop(shard, commands, answers, rank):
        for line in commands.readlines():
            answer = obey(shard, json.loads(line))
            if rank == 0:
                print(json.dumps(answer), file=answers, flush=True)


def some_steps():
    """It serves a hundred commands, and then a fresh process is to be started.

    kind: sizes
    hint: was not obeyed
    """

    def obey(shard, command):
        try:
            if command["do"] == "prefill":
                return {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
            return {"tokens": shard.decode(command["slots"], command["tokens"])}
        except ValueError as error:
            return {"error": str(error)}

    def loop(shard, commands, answers, rank):
        for _, line in zip(range(100), commands):
            answer = obey(shard, json.loads(line))
            if rank == 0:
                print(json.dumps(answer), file=answers, flush=True)


def the_courses_own():
    """The course's own sum over ranks.

    kind: library
    hint: that is the library
    """

    from utils.parallel.tensor import reduce_from_region as summed

    def layer(x, attend, mlp):
        x = x + summed(attend(x))
        return x + summed(mlp(x))


def twice():
    """Attention is computed twice: once for its sum, once for its shape.

    kind: work
    hint: each call of attend writes | Each call of attend writes
    """

    def layer(x, attend, mlp):
        import torch

        part = torch.zeros_like(attend(x))
        part += attend(x)
        dist.all_reduce(part)
        x = x + part
        part = mlp(x)
        dist.all_reduce(part)
        return x + part


def without_waiting():
    """The sum of the MLP is on its way while the layer returns.

    kind: luck
    hint: is each waited for before its result is read
    """

    def layer(x, attend, mlp):
        part = attend(x)
        dist.all_reduce(part)
        x = x + part
        part = mlp(x)
        dist.all_reduce(part, async_op=True)
        return x + part
