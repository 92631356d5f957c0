"""What the lessons, the labs and the server share. One idea a file; see the map in README.md."""

import logging

# transformers imports torchao where it is installed, and that tells every process, and so every
# notebook, which kernels for GPUs it cannot load
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
