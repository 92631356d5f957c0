"""Trains, measures and describes the models in this folder: `python -m models.build`."""
