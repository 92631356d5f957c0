"""The kernels of this room run interpreted on the CPU and compiled on a GPU."""

import multiprocessing
import os
from unittest import mock

import pytest
import torch

from tests.patience import patience


@pytest.fixture(scope="package")
def interpreter():
    """Call a test module's function in a process whose kernels are interpreted: the environment at
    Triton's import decides that, and this process may have imported it already."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there,), daemon=True)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        process.start()
    there.close()

    def run(function, *arguments):
        here.send((function, arguments))
        assert here.poll(patience(200)), "no answer"
        result = here.recv()
        if isinstance(result, Exception):
            raise result
        return result

    yield run
    process.kill()
    process.join()


def _answer(pipe):
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
            result = function(*arguments)
        except EOFError:
            return
        except Exception as error:
            result = error
        pipe.send(result)


@pytest.fixture(params=["cpu", "cuda"])
def on(request):
    """on(function, ...) calls function(device, ...) where kernels can run on that device."""
    if request.param == "cpu":
        run = request.getfixturevalue("interpreter")
        return lambda function, *arguments: run(function, "cpu", *arguments)
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return lambda function, *arguments: function("cuda", *arguments)
