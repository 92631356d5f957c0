"""What lab 11 gives: three programs for each learner's number, what they run on, and the checks."""
