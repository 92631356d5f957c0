"""Lab 17, exercise b: a Triton model of your own, which streams running totals to its client.

    config.pbtxt says
        max_batch_size: 16                                  adds a dimension in front of all shapes
        input  { name: "numbers" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }
        output { name: "total"   data_type: TYPE_INT64 dims: [ 1 ] }
        dynamic_batching { max_queue_delay_microseconds: 200000 }
        model_transaction_policy { decoupled: true }        any number of responses to a request
        parameters { key: "size" value { string_value: "3" } }

Triton imports this file in a process of its own and creates one TritonPythonModel. It calls
`initialize` once, when the model is loaded, and `execute` for the requests that have arrived:
possibly several in one call, from different clients, each with its own shape.

A request has `numbers`, (B, n), int64: B rows, and n may be 0. It gets

- one response for every `size` numbers of the rows, and one for the rest at their end: `total`,
  (B, 1), int64, the sum of each row up to there. With size 3, a row of 7 numbers gets three totals:
  of 3, 6 and 7 numbers. They are sent in this order.
- then the end: the final flag on its own, and nothing after it.
- if one of its numbers is negative, instead of all this, a single error with the final flag:
  INVALID_ARG, with a message that names the first such number, in row order. That is this client's
  mistake: the other requests of the call are answered as usual.

`execute` returns None. The numbers are not changed, and nothing is kept of a request that is over.
"""

import json

import triton_python_backend_utils as pb

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        """Read the configuration. args["model_config"]: config.pbtxt as a JSON string."""
        raise NotImplementedError("keep the parameter size of config.pbtxt, as an integer")

    def execute(self, requests):
        """Answer each request with its response sender."""
        raise NotImplementedError("send each request its totals and then the end, or one error")
