"""Watch every operator that runs, and find the tensors in what it takes and gives."""

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)


class Watching(TorchDispatchMode):
    """Calls `saw(func, tensors, outputs)` before each operator of this thread and after it.

    tensors are its arguments (outputs=False) or its results (outputs=True), nested as they come.
    The backward passes that the thread starts are seen as well, on whichever thread they run.
    """

    def __init__(self, saw):
        super().__init__()
        self.saw = saw

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spares each fresh rank the import of the compiler, 0.9 s, at its first operator."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # a wrapper (DTensor …) first unfolds into the operators that it stands for
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        self.saw(func, (args, kwargs), outputs=False)
        result = func(*args, **kwargs)
        self.saw(func, result, outputs=True)
        return result


def tensors_in(nested):
    """The plain tensors in nested lists, tuples and dictionaries."""
    if isinstance(nested, torch.Tensor):
        yield from plain_tensors(nested)
    elif isinstance(nested, (list, tuple)):
        for item in nested:
            yield from tensors_in(item)
    elif isinstance(nested, dict):
        for item in nested.values():
            yield from tensors_in(item)


def plain_tensors(tensor):
    """The tensors that a wrapper (DTensor …) holds; a plain tensor itself; nothing for the rest."""
    if not isinstance(tensor, torch.Tensor):
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(tensor, name))
