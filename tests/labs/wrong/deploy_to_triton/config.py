"""Lab 16, config: each body, written after the solution, is a wrong answer."""


def always_two():
    """The number of ranks stands in the text.

    kind: constants
    hint: the parameter “tp” is “2”, not
    """

    import dataclasses

    right = config

    def config(model):
        if "tp" in model.parameters:
            model = dataclasses.replace(model, parameters={**model.parameters, "tp": 2})
        return right(model)


def another_name():
    """The output has another name than the model gives it.

    kind: values
    hint: the output tokens is one too many
    """

    right = config

    def config(model):
        return right(model).replace("output_ids", "tokens")


def as_json():
    """Triton's file is protobuf text, not JSON.

    kind: values
    hint: Triton cannot read the text
    """

    def config(model):
        inputs = [{"name": tensor.name, "dims": tensor.dims} for tensor in model.inputs]
        return json.dumps({"backend": "python", "input": inputs, "parameters": model.parameters})


def between_quotes():
    """Texts stand between quotes, with whatever quotes and backslashes they have.

    kind: values
    hint: Triton cannot read the text | the parameter
    """

    class json:
        def dumps(text):
            return f'"{text}"'


def batch_dimension():
    """The dimension of the batch is written in front of the others.

    kind: sizes
    hint: the dimension of a batch is not among them
    """

    right = config

    def config(model):
        text = right(model)
        return text.replace("dims: [ ", "dims: [ -1, ") if model.max_batch else text


def batches():
    """The server adds a batch dimension.

    kind: constants
    hint: the server adds a dimension in front
    """

    right = config

    def config(model):
        return right(model).replace("max_batch_size: 0", "max_batch_size: 8")


def bool_in_a_list():
    """A list where one value is meant.

    kind: types
    hint: Triton cannot read the text
    """

    right = config

    def config(model):
        return right(model).replace("optional: true", f"optional: {[True]}")


def by_name():
    """What was written for a name is kept: the next model of this name gets the text of the first.

    kind: step
    hint: has the type | has the dims | may be left out | must not be left out | the parameter
    """

    right, texts = config, {}

    def config(model):
        if model.name not in texts:
            texts[model.name] = right(model)
        return texts[model.name]


def changed_in_place():
    """The parameters are turned into texts where they stand.

    kind: inputs
    hint: config changes model.parameters, and its owner still needs it
    """

    right = config

    def config(model):
        for name, value in model.parameters.items():
            model.parameters[name] = str(value)
        return right(model)


def delay_of_zero():
    """No delay and a delay of 0 are not the same: 0 still makes batches of those who wait.

    kind: odd
    hint: there is no dynamic_batching, and model.delay is 0
    """

    right = config

    def config(model):
        text = right(model)
        return text.replace("dynamic_batching { max_queue_delay_microseconds: 0 }", "")


def dynamic_batching():
    """Dynamic batching and a model that batches by itself.

    kind: constants
    hint: dynamic_batching is on
    """

    right = config

    def config(model):
        text = right(model)
        return text if "dynamic" in text else text + "\ndynamic_batching { }"


def endless_names():
    """It looks for the name's end.

    kind: end
    hint: an endless loop?
    """

    def config(model):
        lines = []
        while len(lines) != len(model.inputs) + 0.5:
            lines = lines[-9:] + [model.name]
        return "".join(lines)


def file_written():
    """The text is written to a file instead of returned.

    kind: part
    hint: config returns None (NoneType), not the text of the file
    """

    from pathlib import Path

    right = config

    def config(model):
        Path("config.pbtxt").unlink(missing_ok=True)


def first_dimension():
    """Only the first of the dims.

    kind: part
    hint: has the dims
    """

    import re

    right = config

    def config(model):
        return re.sub(r"dims: \[ (-?\d+)[^]]*\]", r"dims: [ \1 ]", right(model))


def floats_are_fp32():
    """Every float is one of 32 bits.

    kind: types
    hint: has the type TYPE_FP32, and clients send
    """

    import re

    right = config

    def config(model):
        return re.sub("TYPE_(BF|FP)[0-9]+", "TYPE_FP32", right(model))


def input_missing():
    """An input that the model knows is not told.

    kind: part
    hint: there is no input
    """

    import dataclasses

    right = config

    def config(model):
        return right(dataclasses.replace(model, inputs=model.inputs[:2]))


def instance_for_each_rank():
    """An instance for each rank: each starts all ranks.

    kind: values
    hint: one process group is one instance | instances, not
    """

    right = config

    def config(model):
        count = model.instances + len(model.parameters)
        return right(model).replace(f"count: {model.instances}", f"count: {count}")


def int64():
    """The tokens have Python's width, not the client's.

    kind: types
    hint: the input input_ids has the type TYPE_INT64, and clients send int32
    """

    right = config

    def config(model):
        return right(model).replace("TYPE_INT32 dims: [ -1 ] }", "TYPE_INT64 dims: [ -1 ] }")


def kind_cpu():
    """The server places the instance.

    kind: constants
    hint: not KIND_MODEL
    """

    right = config

    def config(model):
        return right(model).replace("KIND_MODEL", "KIND_CPU")


def length_wanted():
    """Every request must say how much it wants.

    kind: odd
    hint: the input max_tokens may be left out: optional: true
    """

    right = config

    def config(model):
        return right(model).replace("dims: [ 1 ] optional: true", "dims: [ 1 ]")


def no_instance_group():
    """The server chooses: one instance for each GPU.

    kind: part
    hint: the kind of the instance group is not said, not KIND_MODEL
    """

    right = config

    def config(model):
        return right(model).replace("instance_group [ { kind: KIND_MODEL count: 1 } ]", "")


def no_tp():
    """The model cannot know how many ranks it has.

    kind: part
    hint: there is no parameter “tp”
    """

    import re

    right = config

    def config(model):
        return re.sub(r'parameters { key: "tp" .*', "", right(model))


def not_decoupled():
    """The transaction policy is left out: one response for each request.

    kind: part
    hint: the model is not decoupled
    """

    right = config

    def config(model):
        return right(model).replace("model_transaction_policy { decoupled: true }", "")


def one_input_for_all():
    """The inputs have the type of the first.

    kind: sizes
    hint: has the type
    """

    import dataclasses

    right = config

    def config(model):
        dtype = model.inputs[0].dtype
        inputs = [dataclasses.replace(tensor, dtype=dtype) for tensor in model.inputs]
        return right(dataclasses.replace(model, inputs=inputs))


def one_token():
    """Exactly one token may come.

    kind: values
    hint: the input input_ids has the dims [1], not [-1]
    """

    right = config

    def config(model):
        return right(model).replace("dims: [ -1 ] }", "dims: [ 1 ] }")


def other_slots():
    """Another number of slots than was asked for.

    kind: constants
    hint: the parameter “slots” is “
    """

    import re

    right = config

    def config(model):
        return re.sub(r'"slots" value { string_value: "', r"\g<0>1", right(model))


def parameter_is_a_number():
    """A parameter's value is a string, always.

    kind: types
    hint: Triton cannot read the text
    """

    right = config

    def config(model):
        tp = model.parameters.get("tp")
        return right(model).replace(f'string_value: "{tp}"', f"int64_value: {tp}")


def small_queue():
    """A policy that nobody asked for: most requests are refused.

    kind: values
    hint: dynamic_batching has default_queue_policy, which nobody asked for
    """

    right = config

    def config(model):
        policy = "{ default_queue_policy { max_queue_size: 1 } max_queue"
        return right(model).replace("{ max_queue", policy)


def streams_always():
    """All models are decoupled.

    kind: constants
    hint: the model is decoupled, and each of its requests has one response
    """

    import dataclasses

    right = config

    def config(model):
        return right(dataclasses.replace(model, streams=True))


def the_lessons_file():
    """The file of the workshop's engine.

    kind: library
    hint: that is the library
    """

    from utils.paths import ROOT

    def config(model):
        return (ROOT / "triton_model_repo" / "gpt_engine" / "config.pbtxt").read_text()


def two_instances():
    """Two leaders, each with ranks of its own.

    kind: constants
    hint: one process group is one instance
    """

    right = config

    def config(model):
        return right(model).replace("count: 1 ", "count: 2 ")


def unsigned():
    """Numbers without a sign are written as those with one.

    kind: types
    hint: has the type TYPE_INT
    """

    right = config

    def config(model):
        return right(model).replace("TYPE_UINT", "TYPE_INT")


def a_batch_it_prefers():
    """The server sends half a batch off at once, where the delay would have filled it.

    kind: values
    hint: dynamic_batching has preferred_batch_size
    """

    def config(model, right=config):
        delay = "dynamic_batching {"
        return right(model).replace(delay, f"{delay} preferred_batch_size: [ 1 ]")
