"""Predictions, the checks of the labs, and a learner's progress.

predictions   predict, reveal: a number first, the measurement afterwards
checks        check: the function that a lab's check cell calls
runner        the Trial that it gives the lab's own check: drawn cases, ranks that run the answer,
              limits; assertions, observe, messages, slow_network: right or Wrong, what a rank did,
              what it waited for, a network that delivers results late
contract      a check as data, for a function of tensors on N ranks, and the runner that tests
              everything it promises
properties    properties of drawn examples; an object compared with a reference
progress      a report of every lesson and lab (`make progress`); ledger: the one file behind it
hand          ask_for_help, helped: a request to the instructor, if the lab has joined a class

Import the others from their files: a lesson without ranks should not wait for them.
"""

from utils.course.hand import ask_for_help, helped

__all__ = ["ask_for_help", "helped"]
