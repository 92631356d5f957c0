"""Lab 17, exercise a: the config.pbtxt, what the server has to know of a model.

    config(model)        the text of the file

    model.name           the model's and its folder's; the file may leave it out
    model.inputs         a list of tensors, each with
        .name
        .dtype           "bool", "int8" … "int64", "uint8" … "uint64", "float16" … "float64" as in
                         NumPy, or "bfloat16", "string". Triton calls them TYPE_BOOL, TYPE_INT8 …,
                         TYPE_UINT8 …, TYPE_FP16 …, TYPE_BF16, TYPE_STRING
        .dims            a list of sizes, without that of the batch; -1: any
        .optional        whether a request may leave it out; never true of an output
    model.outputs        the same
    model.max_batch      how many requests the server may hand over as one batch; 0: nobody but the
                         model makes batches
    model.delay          None, or how many microseconds the server may hold requests back to make
                         a batch: dynamic batching
    model.streams        whether a request may get any number of responses (else exactly one)
    model.instances      how many processes the server starts
    model.device         what it gives to each: "cpu", "gpu", or "model": devices are the model's
                         own affair
    model.parameters     {name: value}, texts and numbers. The file has a text for each, str(value),
                         and there may be quotes and backslashes in it

The backend is Triton's Python backend. The file says all this, and nothing else that changes what
the server does (comments and parameters of your own are fine). `model` stays as it is. Write the
text by hand, or with what is installed: tritonclient and protobuf, not the workshop's `utils`.
"""

import json


def config(model):
    """The text of config.pbtxt for a model."""
    ### BEGIN SOLUTION: return the text of config.pbtxt
    lines = ['backend: "python"', f"max_batch_size: {model.max_batch}"]
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        for tensor in tensors:
            dtype = tensor.dtype.upper().replace("BFLOAT", "BF").replace("FLOAT", "FP")
            dims = ", ".join(map(str, tensor.dims))
            what = f"name: {json.dumps(tensor.name)} data_type: TYPE_{dtype} dims: [ {dims} ]"
            optional = " optional: true" * tensor.optional
            lines.append(f"{kind} {{ {what}{optional} }}")
    if model.delay is not None:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {model.delay} }}")
    if model.streams:
        lines.append("model_transaction_policy { decoupled: true }")
    kind = f"KIND_{model.device.upper()}"
    lines.append(f"instance_group [ {{ kind: {kind} count: {model.instances} }} ]")
    for name, value in model.parameters.items():
        text = f"string_value: {json.dumps(str(value))}"  # a text of JSON is one of protobuf
        lines.append(f"parameters {{ key: {json.dumps(name)} value {{ {text} }} }}")
    return "\n".join(lines)
    ### END SOLUTION
