"""Given: what the ranks do for a check, with loads that are as uneven as they come."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from utils.measure.traffic import Traffic

# TABLE[r][d]: rows that rank r has for rank d; rank 1 has none, and with 2 ranks gets none
TABLE = [[3, 0, 2, 1], [0, 0, 0, 0], [4, 1, 0, 2], [1, 5, 0, 0]]
# and here no rank's rows can be cut into equal parts, so that who tries gets an error at once
ODD = [[1, 2, 1, 1], [2, 1, 2, 4], [3, 2, 2, 2], [1, 1, 1, 2]]
WIDTH = 6  # C
PER_RANK = 2  # experts


@dataclass(frozen=True)
class Case:
    name: str
    tokens: tuple[int, ...]  # S, by rank
    choices: int  # k
    wanted: int | None = None  # all choices fall on the first so many experts


CASES = (
    Case("uneven tokens", (4, 6, 1, 3), 2),
    Case("a rank without tokens", (5, 0, 3, 8), 2),
    Case("everybody wants rank 0", (3, 2, 4, 2), 2, wanted=2),
    Case("one choice for each token", (2, 5, 0, 4), 1),
)


def _events(traffic: Traffic) -> list[tuple[str, int]]:
    return [(event.op, int(event.sent)) for event in traffic.events]


# ---- exercise a


def exchange(answer) -> list[dict]:
    """On a rank: rows by each table, there, and their gradients back."""
    size, rank = dist.get_world_size(), dist.get_rank()
    results = []
    for table in (ODD, TABLE, list(zip(*TABLE))):
        rows = torch.cat([_labelled(rank, d, table[rank][d]) for d in range(size)])
        expected = torch.cat([_labelled(r, rank, table[r][rank]) for r in range(size)])
        send = [table[rank][d] for d in range(size)]
        receive = [table[r][rank] for r in range(size)]
        rows.requires_grad_()
        with Traffic() as forward:
            arrived = answer.AllToAll.apply(rows, send, receive)
        result = {"arrived": arrived.detach(), "expected": expected, "forward": _events(forward)}
        row = 3 * 8
        result["bytes"] = {
            "forward": row * (sum(send) - send[rank]),
            "backward": row * (sum(receive) - receive[rank]),
        }
        result["expected gradient"] = 7 * rows.detach()
        result["expected of a sum"] = torch.ones_like(rows)
        result["gradient"] = result["of a sum"] = None
        result["backward"] = []
        if arrived.shape == expected.shape and arrived.requires_grad:
            with Traffic() as backward:
                (7 * arrived * arrived.detach()).sum().backward()
            result["backward"], result["gradient"] = _events(backward), rows.grad
            rows.grad = None
            answer.AllToAll.apply(rows, send, receive).sum().backward()  # one value, expanded
            result["of a sum"] = rows.grad
        results.append(result)
        if not _everybody(torch.equal(arrived.detach(), expected)):
            break  # sizes that do not fit together would end the process
    return results


def _everybody(right: bool) -> bool:
    """Whether it is so on all ranks."""
    answers = torch.tensor(int(right))
    dist.all_reduce(answers)
    return int(answers) == dist.get_world_size()


def _labelled(origin: int, goal: int, count: int) -> torch.Tensor:
    """(count, 3) rows that say where they come from and where they go."""
    rows = [[float(origin + 1), float(goal + 1), float(number)] for number in range(count)]
    return torch.tensor(rows, dtype=torch.float64).view(count, 3)


# ---- exercises b and c


def tokens_of(case: Case, rank: int) -> torch.Tensor:
    """(S, C) of a rank: the first column names the token."""
    seed = torch.Generator().manual_seed(100 + rank)
    tokens = torch.randn(case.tokens[rank], WIDTH, generator=seed, dtype=torch.float64)
    tokens[:, 0] = torch.arange(len(tokens)) + 1 + 100 * rank
    return tokens


def chosen_of(case: Case, rank: int, size: int) -> torch.Tensor:
    """(S, k) of a rank: different experts for each token, never expert 1 unless it must be."""
    seed = torch.Generator().manual_seed(200 + rank)
    liking = torch.rand(case.tokens[rank], PER_RANK * size, generator=seed)
    if case.wanted is not None:
        liking[:, case.wanted :] -= 2
    elif size > 1:
        liking[:, 1] -= 2
    return liking.argsort(dim=1, descending=True)[:, : case.choices]


def weights_of(case: Case, rank: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(300 + rank)
    shape = (case.tokens[rank], case.choices)
    return torch.rand(shape, generator=seed, dtype=torch.float64) + 0.1


def _bytes_for_others(case: Case, rank: int, size: int) -> tuple[int, int]:
    """(of the rows that go out, of the results that go out)."""
    own = [chosen_of(case, r, size) // PER_RANK for r in range(size)]  # the ranks of the experts
    row = WIDTH * 8
    out = int((own[rank] != rank).sum())
    back = sum(int((own[r] == rank).sum()) for r in range(size) if r != rank)
    return row * out, row * back


def _told(answer, case: Case) -> dict:
    """What `tell` makes of the counts of a case, and what it should."""
    size, rank = dist.get_world_size(), dist.get_rank()
    counts = torch.stack([
        chosen_of(case, r, size).flatten().bincount(minlength=PER_RANK * size)
        for r in range(size)
    ])  # (N, E)  # fmt: skip
    expected = counts.view(size, size, PER_RANK)[:, rank]
    return {"told": answer.tell(counts[rank].clone()), "should": expected, "counts": counts[rank]}


def _is_right(told: dict) -> bool:
    return isinstance(told["told"], torch.Tensor) and torch.equal(told["told"], told["should"])


def send_out(answer) -> list[dict]:
    """On a rank: `tell` of every case and, if all of them are right, `dispatch`; and what should
    have come."""
    size, rank = dist.get_world_size(), dist.get_rank()
    told = [_told(answer, case) for case in CASES]
    if not _everybody(all(map(_is_right, told))):
        return told  # sizes that do not fit together would end the process
    results = []
    for index, case in enumerate(CASES):
        tokens = tokens_of(case, rank).requires_grad_()
        chosen = chosen_of(case, rank, size)
        with Traffic() as traffic:
            rows, way = answer.dispatch(tokens, chosen, PER_RANK * size)
        expected = []
        for expert in range(PER_RANK * rank, PER_RANK * (rank + 1)):
            wanted = [
                tokens_of(case, r)[(chosen_of(case, r, size) == expert).any(1)] for r in range(size)
            ]
            expected.append(torch.cat(wanted))
        first = PER_RANK * rank
        result = {
            **told[index],
            "rows": rows.detach(),
            "loads": way.loads,
            "expected rows": expected,
            "expected loads": [len(part) for part in expected],
            "own loads": [int((chosen == first + e).sum()) for e in range(PER_RANK)],
            "width": WIDTH,
            "forward": _events(traffic),
            "bytes": _bytes_for_others(case, rank, size)[0],
            "for counts": 8 * PER_RANK * size * (size - 1),  # of an all-gather, the longest way
            "expected gradient": case.choices * tokens.detach(),
            "gradient": None,
        }
        if rows.requires_grad:
            (rows * rows.detach()).sum().backward()
            result["gradient"] = tokens.grad
        results.append(result)
    return results


def there_and_back(answer) -> list[dict]:
    """On a rank: the layer of every case, its gradients, and the same on one rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    results = []
    for case in CASES:
        tokens, weights = tokens_of(case, rank), weights_of(case, rank)
        tokens.requires_grad_(), weights.requires_grad_()
        own = _experts(answer, size)[PER_RANK * rank : PER_RANK * (rank + 1)]
        rows, way = answer.dispatch(tokens, chosen_of(case, rank, size), PER_RANK * size)
        computed = answer.run(own, rows, way.loads)
        with Traffic() as combined:
            y = answer.combine(computed, weights, way)
        expected, target = _alone(answer, case, size), _target(case, rank)
        result = {
            "y": y.detach(),
            "expected": expected,
            "choices": case.choices,
            "combine": _events(combined),
            "bytes": _bytes_for_others(case, rank, size)[1],
            "gradients": dict.fromkeys(("tokens", "weights", "experts")),
            "backward": [],
        }
        if y.shape == target.shape and y.requires_grad:
            with Traffic() as backward:
                (y * target).sum().backward()
            result["gradients"] = {
                "tokens": tokens.grad,
                "weights": weights.grad,
                "experts": _flat(own),
            }
            out, back = _bytes_for_others(case, rank, size)
            result["backward"], result["there and back"] = _events(backward), out + back
        results.append(result)
    return results


def _experts(answer, size: int) -> torch.nn.ModuleList:
    return answer.make_experts(PER_RANK * size, WIDTH).double()


def _target(case: Case, rank: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(400 + rank)
    return torch.randn(case.tokens[rank], WIDTH, generator=seed, dtype=torch.float64)


def _flat(experts) -> torch.Tensor | None:
    gradients = [parameter.grad for parameter in experts.parameters()]
    if any(gradient is None for gradient in gradients):
        return None
    return torch.cat([gradient.flatten() for gradient in gradients])


def _alone(answer, case: Case, size: int) -> dict:
    """What this rank should have: all tokens and all experts computed here, token by token."""
    rank, experts, total, mine = dist.get_rank(), _experts(answer, size), 0.0, {}
    for r in range(size):
        tokens, weights = tokens_of(case, r), weights_of(case, r)
        tokens.requires_grad_(), weights.requires_grad_()
        chosen, y, plain = chosen_of(case, r, size), [], []
        for s in range(len(tokens)):
            results = torch.stack([experts[int(e)](tokens[s]) for e in chosen[s]])  # (k, C)
            y.append((weights[s, :, None] * results).sum(dim=0))
            plain.append(results.sum(dim=0).detach())
        empty = tokens.new_zeros(0, WIDTH)
        y = torch.stack(y) if y else empty
        total = total + (y * _target(case, r)).sum()
        if r == rank:
            mine = {"y": y.detach(), "sum": torch.stack(plain) if plain else empty}
            leaves = tokens, weights
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    for parameter in experts.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for name, leaf in zip(("tokens", "weights"), leaves):
        mine[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    mine["experts"] = _flat(experts[PER_RANK * rank : PER_RANK * (rank + 1)])
    return mine
