"""Lab 17, exercise b: a Triton model of your own. It adds numbers up while its client looks on.

    config.pbtxt says
        max_batch_size: 16                                  a dimension more, in front of all shapes
        input  { name: "numbers" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }
        output { name: "total"   data_type: TYPE_INT64 dims: [ 1 ] }
        dynamic_batching { max_queue_delay_microseconds: 200000 }
        model_transaction_policy { decoupled: true }        any number of responses to a request
        parameters { key: "size" value { string_value: "3" } }

Triton imports this file in a process of its own and makes one TritonPythonModel. It calls
`initialize` once, when the model is loaded, and `execute` for whatever requests have come: several
in one call, of different clients, each with numbers of its own shape.

A request has `numbers`, (B, n), int64: B rows, and n may be 0. It gets

- for each `size` numbers of the rows, and for what is left at their end, one response: `total`,
  (B, 1), int64, the sum of each row from its beginning to there. With size 3, a row of 7 numbers
  gets three totals: of 3, 6 and 7 numbers. They are sent in this order.
- then the end: the final flag, alone, and nothing after it.
- where one of its numbers is negative, instead of all this, a single error, with the final flag:
  INVALID_ARG, with a message that names the first such number, row by row. That is this client's
  mistake: the other requests of the call are answered as ever.

`execute` returns None. The numbers stay as they are, and of a request that is over nothing is kept.
"""

import json

import triton_python_backend_utils as pb

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        """args["model_config"]: config.pbtxt, as a text of JSON."""
        raise NotImplementedError("keep the parameter size of config.pbtxt, as a whole number")

    def execute(self, requests):
        """Answers each request by the response sender that it has."""
        raise NotImplementedError("to each request its totals and then the end, or one error")
