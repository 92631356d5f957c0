"""Predictions, the checks of the labs, and how far a learner is.

predictions   predict, reveal: a number first, the measurement afterwards
checks        check: what a lab's check cell calls; the kit that the labs' own checks share
progress      every lesson and lab, told (`make progress`); record: the one file behind all three

Import from the files: a lesson without ranks shall not wait for them.
"""
