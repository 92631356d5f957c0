"""Predictions, the checks of the labs, and how far a learner is.

predictions   predict, reveal: a number first, the measurement afterwards
checks        check: what a lab's check cell calls
trial         what it hands to the lab's own check: drawn cases, ranks that run the answer, limits;
              expect, look, noted, late and trap are the rest of that kit: right or Wrong, what a
              rank did, what it waited for, a network on which results come late, a library that
              it must not use
contract      a check as data, and the runner that looks at all that it promises
progress      every lesson and lab, told (`make progress`); record: the one file behind all of it
hand          ask_for_help, helped: to the instructor, where the lab has joined a class

Import the others from the files: a lesson without ranks shall not wait for them.
"""

from utils.course.hand import ask_for_help, helped

__all__ = ["ask_for_help", "helped"]
