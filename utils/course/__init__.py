"""Predictions, the checks of the labs, and how far a learner is.

predictions   predict, reveal: a number first, the measurement afterwards
checks        check: what a lab's check cell calls
runner        what it hands to the lab's own check: drawn cases, ranks that run the answer, limits;
              assertions, observe, messages, slow_network: right or Wrong, what a rank did, what it
              waited for, a network on which results come late
contract      a check as data, and the runner that looks at all that it promises: a function of
              tensors on N ranks
properties    what must hold for whatever is drawn; an object beside a reference
progress      every lesson and lab, told (`make progress`); ledger: the one file behind all of it
hand          ask_for_help, helped: to the instructor, where the lab has joined a class

Import the others from the files: a lesson without ranks shall not wait for them.
"""

from utils.course.hand import ask_for_help, helped

__all__ = ["ask_for_help", "helped"]
