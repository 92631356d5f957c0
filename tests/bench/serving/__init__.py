"""The benchmark of the served model: `python -m utils.serving.bench`, which runs `__main__.py`.

contenders.py   engine, Triton, gateway, transformers and CTranslate2, idle until they are called
peer.py         transformers or CTranslate2 in its own process
"""
