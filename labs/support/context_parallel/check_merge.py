"""Given: what the check cell of a looks at: values, types, overflow, and queries without a key.

One process merges attentions in many shapes and types; the numbers are compared with float64.
"""

import torch

from labs.support.context_parallel.judging import LIBRARY, name_of
from labs.support.context_parallel.scenarios import merges, parts_of
from utils.course.assertions import SLACK, Wrong, close, unchanged
from utils.course.runner import Trial

FAR = {torch.float64: 2000.0, torch.float32: 300.0, torch.bfloat16: 300.0}  # exp is inf, or 0


def merge(trial: Trial) -> str:
    """Judges `merge`."""
    trial.forbid(LIBRARY)
    dtypes = [*trial.draw.sample([torch.float64, torch.float32], 2), torch.bfloat16]
    cases = [case for dtype in dtypes for case in _cases(trial, dtype)]
    words = "several attentions, merged one after the other"
    for case, found in zip(cases, trial.alone(words, merges, cases)):
        _right_merge(case, found)
    return (
        "two attentions are one, in fp64, fp32 and bf16, in many shapes; however large or small\n"
        "the sums are; queries that have seen no key count for nothing, also where neither has\n"
        "seen one; a NaN stays with its query; nothing is changed that was given, or kept."
    )


def _cases(trial: Trial, dtype: torch.dtype) -> list[dict]:
    draw, far = trial.draw, FAR[dtype]
    least = {"around": (0.0, 0.0), "nothing": ("", ""), "nan": None, "transposed": False}
    kinds = [
        {}, {"around": (far, far)}, {"around": (-far, -far)}, {"around": (far, -far)},
        {"around": (-far, far), "transposed": True},
        {"nothing": draw.sample(["some", ""], 2), "nan": draw.randrange(2)},
        {"nothing": ("some", "some"), "around": (far, 0.0)},
        {"nothing": draw.sample(["all", "some"], 2), "transposed": True},
        {"nothing": ("all", "all")}, {"nan": draw.randrange(2)},
    ]
    cases = []
    for kind in kinds:
        shape = tuple(draw.randrange(1, most) for most in (4, 9, 5, 9))
        cases.append(least | kind | {"shape": shape, "dtype": dtype, "seed": trial.new_seed()})
    cases[0]["shape"] = (draw.randrange(2, 4), draw.randrange(40, 60), 3, draw.randrange(40, 50))
    return cases


def _right_merge(case: dict, found: dict) -> None:
    where = f"{case['shape']} in {name_of(case['dtype'])}"
    if any(case["around"]):
        where += ", logarithms around {:g} and {:g}".format(*case["around"])
    for which, empty in zip(("first", "second"), case["nothing"]):
        where += f", {empty} queries of the {which} have seen no key" * bool(empty)
    if case["nan"] is not None:
        where += f", a NaN in one query of {('out', 'more')[case['nan']]}"
    given = parts_of(case)
    unchanged(where, found["changed"])
    out, lse, more, more_lse = (x.double() for x in given.values())
    total = torch.logaddexp(lse, more_lse)
    shares = [torch.where(x == -torch.inf, 0.0, (x - total).exp())[..., None]
              for x in (lse, more_lse)]
    merged = out * shares[0] + more * shares[1]
    far = max(abs(number) for number in case["around"])
    slack = SLACK + 8 * far * (case["dtype"] != torch.bfloat16)  # lse has fp32's digits there
    hint = _hint(found, merged, total, out, more)
    if isinstance(found["out"], torch.Tensor) and found["out"].dtype != case["dtype"]:
        hint = "Compute in lse's type, and go back to out's type at the end: .to(out.dtype)"
    close(where, "lse", found["lse"], total, hint=hint, dtype=given["lse"].dtype, slack=slack)
    close(where, "out", found["out"], merged, hint=hint, dtype=case["dtype"], slack=slack)
    _rounded_once(where, found["out"], merged)
    if found["events"]:
        raise Wrong(f"{where}: a message is sent. Both attentions are on this rank.")
    most = 2 * out.numel() * max(4, case["dtype"].itemsize)
    if found["largest"] > most:
        raise Wrong(
            f"{where}: a tensor of {found['largest']:,} bytes is made; out and more together, in "
            f"lse's type,\nhave {most:,}."
        )
    if found["kept"]:
        raise Wrong(
            f"{where}: {found['kept']:,} bytes that merge has made are still held afterwards.\n"
            "Who remembers them, and what for?"
        )


def _rounded_once(where: str, out: torch.Tensor, merged: torch.Tensor) -> None:
    """bf16 is as coarse as what is lost by computing in it, so many numbers are looked at."""
    if out.dtype != torch.bfloat16 or out.numel() < 1000:
        return
    other = (out != merged.to(out.dtype)).sum().item()
    if other > out.numel() / 20:
        raise Wrong(
            f"{where}: {other:,} of {out.numel():,} numbers of out are not the right ones, rounded "
            "once.\nIs everything computed in lse's type, and rounded to out's type at the end?"
        )


def _hint(found: dict, merged: torch.Tensor, total: torch.Tensor, *parts: torch.Tensor) -> str:
    """A question that fits the wrong numbers."""
    got, lse = found["out"], found["lse"]
    if not all(isinstance(x, torch.Tensor) for x in (got, lse)) or got.shape != merged.shape:
        return "merge returns two tensors, (out, lse), of the shapes that it was given."
    nothing = total == -torch.inf
    if nothing.any() and (got[nothing].isnan().any() or lse[nothing].isnan().any()):
        return "Nothing was seen at all: what is −inf minus −inf? Zeros and −inf are right."
    if lse.isinf().logical_and(~nothing).any() or lse.isnan().any() or got.isnan().any():
        return (
            "An exponential has become infinite, or a sum of them zero. Can you do with "
            "exponentials\nof differences only? exp(lse − larger) is at most 1."
        )
    if torch.allclose(got.double(), sum(parts), rtol=1e-2, equal_nan=True):
        return "This is the plain sum of both. How much of the sum of exponentials has each?"
    if torch.allclose(got.double(), sum(parts) / 2, rtol=1e-2, equal_nan=True):
        return "This is the mean of both. Has each half of the sum of exponentials?"
    return "out = (Z₁·out + Z₂·more) / (Z₁ + Z₂), where lse is the logarithm of Z₁."
