"""Given: the contract of exercise 16d, the verification of a draft, and the judge behind its check.

First, many draws must follow the target's distribution; then drawn cases, with given uniforms and a
recorded draw, are compared with the rule in fp64.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from utils.course.assertions import Wrong, alike, close, described, unchanged
from utils.course.contract import BOTH
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions

SECONDS = 20.0  # until an answer counts as an endless loop
DRAWS = 4000
SIGMAS = 5.0  # standard deviations that a frequency may be from its probability
APART = 0.1  # least distance between the distributions of wrong rules and the right one
WORDS = 4


def tokens_of(case: str, result: Any) -> list[int]:
    """The result of verify, as ints."""
    try:
        tokens = [operator.index(token) for token in result]
    except TypeError:
        tokens = []
    if not tokens:
        raise Wrong(f"{case}: verify returns {described(result)}, not a list of at least 1 token.")
    return tokens


# ---- many draws


def shares(answer, seed: int) -> None:
    """In one process: verify a draft of one token many times; its first token must follow p[0]."""
    chance = torch.Generator().manual_seed(seed)
    while True:  # until the wrong rules can be distinguished from the right one
        p, q = torch.randn(2, WORDS, generator=chance).double().mul(1.5).softmax(-1)
        kept = torch.minimum(p, q)
        from_p = kept + (1 - kept.sum()) * p
        if min((one - p).abs().max() for one in (q, from_p)) > APART:
            break
    drafted = torch.multinomial(q, DRAWS, replacement=True, generator=chance)
    uniforms, counts = torch.rand(DRAWS, 1, generator=chance).double(), torch.zeros(WORDS).double()

    def draw(distribution: torch.Tensor) -> int:
        return torch.multinomial(distribution, 1, generator=chance).item()

    for token, uniform in zip(drafted, uniforms):
        given = token[None], q[None].clone(), torch.stack([p, p.flip(0)]), uniform
        counts[tokens_of("k = 1", answer.verify(*given, draw))[0]] += 1
    found = counts / DRAWS

    def drawn_from(right: torch.Tensor) -> bool:
        return bool(((found - right).abs() <= SIGMAS * (right * (1 - right) / DRAWS).sqrt()).all())

    if drawn_from(p):
        return
    hint = next((words for right, words in (
        (from_p, "They are as if drawn from p itself after a rejection: a token that the draft "
         "proposes too rarely\ncomes too rarely."),
        (q, "They are the draft's own: is any token rejected?"),
    ) if drawn_from(right)), "")
    mine, wanted = ([round(one, 3) for one in row.tolist()] for row in (found, p))
    raise Wrong(
        f"k = 1, {DRAWS:,} draws: the first tokens have the frequencies {mine}, but the target's "
        f"distribution is {wanted}.\n{hint}"
    )


# ---- one call

KINDS = ("plain", "p with zeros", "q with zeros", "p = q", "greedy p", "both greedy")


@dataclass(frozen=True)
class Draft:
    """k drafted tokens of V. kind: of p and q; part: the uniforms are drawn from [0, part)."""

    k: int
    V: int
    kind: str
    part: float
    dtype: torch.dtype
    seed: int

    def given(self) -> tuple[torch.Tensor, ...]:
        """drafted, q, p, uniforms."""
        k, V, chance = self.k, self.V, torch.Generator().manual_seed(self.seed)
        q, p = fractions(self.seed, 2 * k + 1, V).mul(2).softmax(-1).split([k, k + 1])
        some = torch.rand(k + 1, V, generator=chance) < 0.5
        some[:, 0] = True
        if self.kind == "p with zeros":
            p = p * some
        if self.kind == "q with zeros":
            q = q * some[:k]
        if self.kind == "p = q":
            p = torch.cat([q, p[k:]])
        if "greedy" in self.kind:
            p = F.one_hot(p.argmax(-1), V).double()
        if self.kind == "both greedy":
            q = F.one_hot((p[:k] + q).argmax(-1) if self.seed % 2 else q.argmax(-1), V).double()
        p, q = (one / one.sum(-1, keepdim=True) for one in (p, q))
        drafted = torch.tensor([torch.multinomial(row, 1, generator=chance) for row in q]).long()
        uniforms = torch.rand(k, generator=chance).double() * self.part
        ratios = ratio(drafted, q, p)
        uniforms[(uniforms - ratios).abs() < 1e-3] *= 0.99  # no rounding decides
        return drafted, q.to(self.dtype), p.to(self.dtype), uniforms.to(self.dtype)


def ratio(drafted: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Each drafted token's probability in the target, divided by that in the draft."""
    return (p[:-1] / q).gather(1, drafted[:, None])[:, 0]


def keeps(answer, case: Draft) -> None:
    """In one process: check one call against the whole contract."""
    drafted, q, p, uniforms = case.given()
    asked = []

    def draw(distribution: torch.Tensor) -> int:
        asked.append(distribution)
        return case.V - 1

    with Look(drafted=drafted, q=q, p=p, uniforms=uniforms) as look:
        result = answer.verify(drafted, q, p, uniforms, draw)
    unchanged(str(case), look.changed())
    tokens = tokens_of(str(case), result)
    ratios = ratio(drafted, q.double(), p.double())
    accepted = (uniforms.double() < ratios).long().cumprod(0).sum().item()
    told = f"uniforms {rounded(uniforms)}, p/q of the drafted {rounded(ratios)}"
    if len(asked) != 1:
        raise Wrong(f"{case}: draw is called {len(asked)} times instead of once.")
    if tokens[:-1] != drafted[:accepted].tolist():
        raise Wrong(
            f"{case}: {tokens[:-1]} of the drafted tokens {drafted.tolist()} are kept, and "
            f"{drafted[:accepted].tolist()} is right.\n{told}: a token is accepted if its uniform "
            "is below p/q, up to the first that is not."
        )
    if tokens[-1] != case.V - 1:
        raise Wrong(f"{case}: the last token is {tokens[-1]}, but draw returned {case.V - 1}.")
    last = accepted == case.k
    more = p[-1] if last else (p[accepted].double() - q[accepted].double()).clamp(min=0)
    total, got = more.double().sum().item(), asked[0]
    hint = "After k accepted tokens it is p[k]; otherwise max(p[i] - q[i], 0), normalized to sum 1."
    for wrong, words in () if last else (
        (p[accepted], "That is p[i] itself. Part of it is already covered by accepted tokens; only "
         "the excess of p over q is left."),
        (more, "It must be normalized to sum 1."),
        (q[accepted], "That is the draft's distribution."),
    ):
        hint = words if alike(got, wrong, 64) else hint
    what = f"the distribution given to draw, after {accepted} of {case.k} are accepted"
    close(str(case), what, got, more.double() / total, hint=hint, slack=64, scale=1 / total)


def rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def calls(answer, seed: int) -> None:
    """In one process: check drawn cases."""
    cases = st.builds(
        Draft, st.integers(0, 6), st.integers(2, 9), st.sampled_from(KINDS),
        st.sampled_from([0.999, 0.5, 0.0]), st.sampled_from(BOTH), st.integers(0, 9999),
    )
    for_all(seed, cases, lambda case: keeps(answer, case))


def draft(trial: Trial) -> str:
    """Judge `verify`."""
    trial.forbid(("utils", "transformers", "vllm"))
    trial.alone("many draws", shares, trial.new_seed(), seconds=SECONDS)
    trial.alone("in one process", calls, trial.new_seed(), seconds=SECONDS)
    return (
        f"{DRAWS:,} draws follow the target's distribution within {SIGMAS:g} standard deviations;\n"
        "in drafts of 0 to 6 tokens (greedy ones, p = q and zeros included) it keeps the tokens\n"
        "whose uniform is below p/q, up to the first that is not; one draw, from the right\n"
        "distribution."
    )
