"""The bench of the served model: `python -m utils.serving.bench`, which runs `__main__.py`.

contenders.py   engine, Triton, gateway and transformers, started and idle until they are asked
peer.py         transformers in a process of its own
"""
