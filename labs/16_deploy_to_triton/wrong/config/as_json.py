"""Triton's file is protobuf text, not JSON.

hint: the server refuses the model
"""

import json


def config(tp):
    inputs = [{"name": "input_ids", "data_type": "TYPE_INT32", "dims": [-1]}]
    return json.dumps({"backend": "python", "input": inputs, "parameters": {"tp": str(tp)}})
