"""From text to tokens to batches, split over ranks.

corpus    the text, its tokens, and each rank's rows of every batch
library   Python's standard library as documents
"""
