"""Predictions, the checks of the labs, and how far a learner is."""
