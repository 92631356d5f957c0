"""Lab 17, exercise a: the config.pbtxt, which tells the server about a model.

    config(model)        the text of the file

    model.name           the name of the model and its folder; the file may leave it out
    model.inputs         a list of tensors, each with
        .name
        .dtype           "bool", "int8" … "int64", "uint8" … "uint64", "float16" … "float64" as in
                         NumPy, or "bfloat16", "string". Triton calls them TYPE_BOOL, TYPE_INT8 …,
                         TYPE_UINT8 …, TYPE_FP16 …, TYPE_BF16, TYPE_STRING
        .dims            a list of sizes, without the batch dimension; -1: any
        .optional        whether a request may leave it out; never true of an output
    model.outputs        the same
    model.max_batch      the most requests that the server may pass as one batch; 0: only the model
                         itself makes batches
    model.delay          None, or how many microseconds the server may delay requests to form a
                         batch: dynamic batching
    model.streams        whether a request may get any number of responses (otherwise exactly one)
    model.instances      the number of processes that the server starts
    model.device         the device of each: "cpu", "gpu", or "model": the model chooses its devices
                         itself
    model.parameters     {name: value}, strings and numbers. The file has a string for each,
                         str(value), which may contain quotes and backslashes

The backend is Triton's Python backend. The file says all this, and nothing else that changes the
server's behaviour (comments and parameters of your own are fine). `model` is not changed. Write the
text by hand, or with tritonclient and protobuf, which are installed; not with the workshop's
`utils`.
"""

import json


def config(model):
    """The text of config.pbtxt for a model."""
    raise NotImplementedError("return the text of config.pbtxt")
