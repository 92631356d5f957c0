"""Lab 16, config: each body, written after the solution, is a wrong answer."""


def always_two():
    """The number of ranks stands in the text.

    hint: config(1) and config(2) are the same text
    """

    right = config

    def config(tp):
        return right(tp).replace(f'string_value: "{tp}"', 'string_value: "2"')


def another_name():
    """The output has another name than the model gives it.

    hint: there is no output output_ids. The server knows: tokens
    """

    right = config

    def config(tp):
        return right(tp).replace("output_ids", "tokens")


def as_json():
    """Triton's file is protobuf text, not JSON.

    hint: the server refuses the model
    """

    import json

    def config(tp):
        inputs = [{"name": "input_ids", "data_type": "TYPE_INT32", "dims": [-1]}]
        return json.dumps({"backend": "python", "input": inputs, "parameters": {"tp": str(tp)}})


def batches():
    """The server adds a batch dimension.

    hint: the server adds a dimension in front
    """

    right = config

    def config(tp):
        return right(tp).replace("max_batch_size: 0", "max_batch_size: 8")


def dynamic_batching():
    """Dynamic batching and a model that batches by itself.

    hint: dynamic_batching is on
    """

    right = config

    def config(tp):
        return right(tp).replace("instance_group", "dynamic_batching { }\ninstance_group")


def file_written():
    """The text is written to a file instead of returned.

    hint: config returns NoneType, not the text of the file
    """

    from pathlib import Path

    right = config

    def config(tp):
        Path("config.pbtxt").unlink(missing_ok=True)


def input_missing():
    """An input that the model knows is not told.

    hint: there is no input arrival
    """

    import re

    right = config

    def config(tp):
        return re.sub(r',\s+{ name: "arrival".*?}', "", right(tp))


def instance_for_each_rank():
    """An instance for each rank: each starts all ranks.

    hint: there are 2 instances
    """

    right = config

    def config(tp):
        return right(tp).replace("count: 1", f"count: {tp}")


def int64():
    """The tokens have Python's width, not the client's.

    hint: the input input_ids has the type INT64, and clients send INT32
    """

    right = config

    def config(tp):
        return right(tp).replace("TYPE_INT32 dims: [ -1 ] }", "TYPE_INT64 dims: [ -1 ] }")


def kind_cpu():
    """The server places the instance.

    hint: not KIND_MODEL
    """

    right = config

    def config(tp):
        return right(tp).replace("KIND_MODEL", "KIND_CPU")


def length_wanted():
    """Every request must say how much it wants.

    hint: the input max_tokens may be left out: optional: true
    """

    right = config

    def config(tp):
        return right(tp).replace("dims: [ 1 ] optional: true", "dims: [ 1 ]")


def no_instance_group():
    """The server chooses: one instance for each GPU.

    hint: not KIND_MODEL
    """

    right = config

    def config(tp):
        return right(tp).replace("instance_group [ { kind: KIND_MODEL count: 1 } ]", "")


def no_tp():
    """The model cannot know how many ranks it has.

    hint: the same text
    """

    right = config

    def config(tp):
        return right(tp).replace(f'parameters {{ key: "tp" value {{ string_value: "{tp}" }} }}', "")


def not_decoupled():
    """The transaction policy is left out: one response for each request.

    hint: the model is not decoupled
    """

    right = config

    def config(tp):
        return right(tp).replace("model_transaction_policy { decoupled: true }", "")


def one_token():
    """Exactly one token may come.

    hint: the input input_ids has the dims [1], not [-1]
    """

    right = config

    def config(tp):
        return right(tp).replace("dims: [ -1 ] }", "dims: [ 1 ] }")


def other_slots():
    """Another number of slots than was asked for.

    hint: the parameter slots is “1”, not “4”
    """

    right = config

    def config(tp):
        return right(tp).replace('string_value: "4"', 'string_value: "1"')


def parameter_is_a_number():
    """A parameter's value is a string, always.

    hint: the server refuses the model
    """

    right = config

    def config(tp):
        return right(tp).replace(f'string_value: "{tp}"', f"int64_value: {tp}")


def two_instances():
    """Two leaders, each with ranks of its own.

    hint: One process group is one instance
    """

    right = config

    def config(tp):
        return right(tp).replace("count: 1", "count: 2")
