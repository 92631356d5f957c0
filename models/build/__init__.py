"""How the models in this folder are made, measured and described: `python -m models.build`."""
