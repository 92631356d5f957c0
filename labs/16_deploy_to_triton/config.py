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
    raise NotImplementedError("return the text of config.pbtxt")
