"""Lab 16, exercise a: the config.pbtxt, what the server has to know of a model.

    config(2)      the text of the file, for a model on two ranks

What it has to say:

- the backend is the Python one, and nobody but the model makes batches of requests: 0 as the
  largest batch. (Then the shapes below are whole; else the server adds a dimension in front.)
- inputs: `input_ids`, any number of int32; `max_tokens`, one int32, which may be left out;
  `arrival`, three int32, which may be left out (the checks use it). Output: `output_ids`, int32.
- a request may get many responses: one for each token
- one process leads all ranks, and it chooses their devices itself: one instance, of the kind that
  leaves devices to the model
- the parameters `tp`, how many ranks, and `slots` with the value 4
"""


def config(tp: int) -> str:
    """The text of config.pbtxt. tp: how many ranks the model has."""
    ### BEGIN SOLUTION: return the text of config.pbtxt
    return f"""
backend: "python"
max_batch_size: 0
input [
  {{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] }},
  {{ name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }},
  {{ name: "arrival" data_type: TYPE_INT32 dims: [ 3 ] optional: true }}
]
output [ {{ name: "output_ids" data_type: TYPE_INT32 dims: [ -1 ] }} ]
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ kind: KIND_MODEL count: 1 }} ]
parameters {{ key: "tp" value {{ string_value: "{tp}" }} }}
parameters {{ key: "slots" value {{ string_value: "4" }} }}
"""
    ### END SOLUTION
