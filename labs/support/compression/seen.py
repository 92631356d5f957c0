"""Given: what a check sees of a layer: its products with their types, and all that it holds."""

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from utils.course.assertions import Wrong, bitwise_equal
from utils.course.observe import PRODUCTS, Look, Product
from utils.measure.traffic import tensors_in
from utils.serving.engine.linear import exact

FACTORS = PRODUCTS | {"_int_mm": (0, 1)}
CODE = (type, type(Look.saw), type(gc), type(gc.collect))  # what holds modules, not numbers
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class TypedLook(Look):
    """A Look that knows the types of the factors, too: `typed`, [(dtypes, multiplications)]."""

    def __init__(self, **inputs: Any):
        whole_products()
        super().__init__(**inputs)
        self.typed: list[tuple[set[torch.dtype], int]] = []

    def saw(self, func: Callable, given: Any, outputs: bool) -> None:
        super().saw(func, given, outputs)
        name = func.__name__.split(".")[0]
        if not outputs and name in FACTORS and func.namespace == "aten":
            left, right = (given[0][place] for place in FACTORS[name])
            product = Product(tuple(left.shape), tuple(right.shape), backward=False)
            self.typed.append(({left.dtype, right.dtype}, product.multiplications))


@functools.cache
def whole_products() -> torch.library.Library | None:
    """Where PyTorch's product of int8 matrices is wrong for large numbers, as on CPUs without VNNI,
    this process gets one that is right; None where it is."""
    if exact("cpu"):
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it takes the place of another
        library.impl("_int_mm", lambda x, w: (x.double() @ w.double()).int(), "CPU")
    return library


@contextlib.contextmanager
def during(case: str) -> Iterator[None]:
    """What fails inside says in which case."""
    try:
        yield
    except (Wrong, NotImplementedError):
        raise
    except Exception as error:
        error.args = (f"{case}: {error}",)
        raise


def held(thing: Any) -> int:
    """Bytes of all tensors, arrays and texts that can be reached from `thing`, each once."""
    seen, open_, total = set(), [thing], 0
    while open_:
        one = open_.pop()
        if id(one) in seen or isinstance(one, CODE):
            continue
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
            seen.add(id(one))
            open_ += [one.grad_fn] if one.grad_fn is not None else []
            continue
        seen.add(id(one))
        if isinstance(one, np.ndarray | bytes | bytearray):
            total += one.nbytes if isinstance(one, np.ndarray) else len(one)
        if isinstance(one, list | tuple) and one and all(isinstance(x, float | int) for x in one):
            total += 8 * len(one)
        open_ += gc.get_referents(one)
    return total


def no_hooks(case: str, module: nn.Module) -> None:
    """No hook is left in any part of the module."""
    for name, part in module.named_modules():
        if any(getattr(part, kind, None) for kind in HOOKS):
            raise Wrong(f"{case}: a hook is left in {name or 'the model'}: remove() takes it out.")


@contextlib.contextmanager
def left_alone(case: str, model: nn.Module, name: str = "the model", **inputs: Any) -> Iterator:
    """Inside runs a function of the answer. Raises Wrong where the model or an input is not what
    it was: bits, gradients, flags, hooks."""

    def state() -> dict:
        return {
            key: (tensor, tensor.grad, tensor.requires_grad)
            for key, tensor in [*model.named_parameters(), *model.named_buffers()]
        }

    before, modes = state(), [part.training for part in model.modules()]
    bits = {key: tensor.detach().clone() for key, (tensor, *_) in before.items()}
    given = {key: [t.clone() for t in tensors_in(value)] for key, value in inputs.items()}
    yield
    for key, (tensor, grad, wanted) in state().items():
        if key not in before or not bitwise_equal(tensor, bits[key]):
            raise Wrong(f"{case}: {key} of {name} is not what it was before the call.")
        if grad is not before[key][1]:
            raise Wrong(
                f"{case}: {key} of {name} has a gradient now: torch.autograd.grad returns those "
                "that are asked for, and leaves none."
            )
        if wanted != before[key][2]:
            raise Wrong(f"{case}: requires_grad of {key} in {name} is {wanted} now.")
    if len(before) != len(state()) or modes != [part.training for part in model.modules()]:
        raise Wrong(f"{case}: {name} is not what it was: parts are missing, or train() was called.")
    no_hooks(case, model)
    for key, tensors in given.items():
        if not all(map(bitwise_equal, tensors_in(inputs[key]), tensors)):
            raise Wrong(f"{case}: {key} is not what it was before the call.")


def own_memory(case: str, new: nn.Module, *others: nn.Module) -> None:
    """Each tensor of `new` fills its memory, and shares it with none of the others'."""
    taken = {
        t.untyped_storage().data_ptr() for other in others for t in other.state_dict().values()
    }
    for key, tensor in new.state_dict().items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() in taken and storage.nbytes():
            raise Wrong(
                f"{case}: {key} lies in the memory of the model that was given: who trains the new "
                "one changes both."
            )
        if storage.nbytes() > tensor.numel() * tensor.element_size():
            raise Wrong(
                f"{case}: {key} has {tensor.numel() * tensor.element_size():,} bytes and keeps "
                f"{storage.nbytes():,} alive: a slice is a view, .clone() is not."
            )
