"""Lab 07, merge: each body, written after the solution, is a wrong answer."""


def plain_sum():
    """Adds the results.

    kind: values
    hint: This is the plain sum of both
    """

    def merge(out, lse, more, more_lse):
        total = torch.logaddexp(lse, more_lse)
        return torch.where((total == -torch.inf)[..., None], 0.0, out + more).to(out.dtype), total


def mean():
    """Each counts half.

    kind: values
    hint: This is the mean of both
    """

    def merge(out, lse, more, more_lse):
        return (out + more) / 2, torch.logaddexp(lse, more_lse)


def without_the_maximum():
    """Exponentials of the logarithms as they are: right for small scores.

    kind: sizes
    hint: An exponential has become infinite
    """

    def merge(out, lse, more, more_lse):
        first, second = lse.exp(), more_lse.exp()
        total = first + second
        merged = (out * first[..., None] + more * second[..., None]) / total[..., None]
        merged = merged.masked_fill((total == 0)[..., None], 0.0)
        return merged.to(out.dtype), total.log()


def one_maximum_for_all():
    """The largest logarithm of the whole tensor is taken off: a far smaller query is lost.

    kind: odd
    hint: An exponential has become infinite | Nothing was seen at all | lse at
    """

    def merge(out, lse, more, more_lse):
        largest = torch.maximum(lse.max(), more_lse.max())
        first, second = (lse - largest).exp(), (more_lse - largest).exp()
        total = first + second
        merged = (out * first[..., None] + more * second[..., None]) / total[..., None]
        return merged.to(out.dtype), total.log() + largest


def nothing_seen_twice():
    """Where neither has seen a key, −inf is taken from −inf.

    kind: odd
    hint: Nothing was seen at all
    """

    def merge(out, lse, more, more_lse):
        total = torch.logaddexp(lse, more_lse)
        first, second = ((x - total).exp()[..., None] for x in (lse, more_lse))
        return (out * first + more * second).to(out.dtype), total


def swapped():
    """Each result by the other's share.

    kind: values
    hint: where lse is the logarithm of Z₁
    """

    def merge(out, lse, more, more_lse, given=merge):
        merged, _ = given(more, lse, out, more_lse)
        return merged, torch.logaddexp(lse, more_lse)


def adds_the_logarithms():
    """lse + more_lse is the logarithm of the product.

    kind: values
    hint: lse at
    """

    def merge(out, lse, more, more_lse, given=merge):
        return given(out, lse, more, more_lse)[0], lse + more_lse


def the_larger_logarithm():
    """The larger of the two in place of their sum.

    kind: values
    hint: lse at
    """

    def merge(out, lse, more, more_lse, given=merge):
        return given(out, lse, more, more_lse)[0], torch.maximum(lse, more_lse)


def in_place():
    """The first result is overwritten.

    kind: inputs
    hint: out is not what it was before the call
    """

    def merge(out, lse, more, more_lse, given=merge):
        merged, total = given(out, lse, more, more_lse)
        return out.copy_(merged), total


def logarithm_in_place():
    """The first logarithm is overwritten.

    kind: inputs
    hint: lse is not what it was before the call
    """

    def merge(out, lse, more, more_lse, given=merge):
        merged, total = given(out, lse, more, more_lse)
        return merged, lse.copy_(total)


def in_single():
    """Goes through fp32: wrong for fp64.

    kind: types
    hint: is right
    """

    def merge(out, lse, more, more_lse, given=merge):
        merged, total = given(out.float(), lse.float(), more.float(), more_lse.float())
        return merged.to(out.dtype), total.to(lse.dtype)


def the_wider_type():
    """bf16 comes out as fp32.

    kind: types
    hint: is torch.float32, and torch.bfloat16 is right
    """

    def merge(out, lse, more, more_lse, given=merge):
        return given(out.to(lse.dtype), lse, more.to(lse.dtype), more_lse)


def in_bf16():
    """The arithmetic is done in the type of out, so bf16's logarithms lose their digits.

    kind: types
    hint: lse
    """

    def merge(out, lse, more, more_lse, given=merge):
        merged, total = given(out, lse.to(out.dtype), more, more_lse.to(out.dtype))
        return merged, total.to(lse.dtype)


def shares_in_bf16():
    """The logarithms keep their digits, and each result is multiplied in its own type.

    kind: types
    hint: rounded once
    """

    def merge(out, lse, more, more_lse):
        total = torch.logaddexp(lse, more_lse)
        first, second = ((x - total).exp() for x in (lse, more_lse))
        first = first.masked_fill(lse == -torch.inf, 0.0)[..., None].to(out.dtype)
        second = second.masked_fill(more_lse == -torch.inf, 0.0)[..., None].to(out.dtype)
        return out * first + more * second, total


def steps_in_bf16():
    """One result, and a share of the way to the other, in their own type.

    kind: types
    hint: rounded once
    """

    def merge(out, lse, more, more_lse):
        share = torch.sigmoid(more_lse - lse).masked_fill(more_lse == -torch.inf, 0.0)[..., None]
        return out + share.to(out.dtype) * (more - out), torch.logaddexp(lse, more_lse)


def remembers_the_results():
    """Every result stays in a list.

    kind: memory
    hint: are still held afterwards
    """

    results = []

    def merge(out, lse, more, more_lse, given=merge):
        results.append(given(out, lse, more, more_lse))
        return results[-1]


def one_share_for_all_heads():
    """The logarithms are averaged over the heads.

    kind: constants
    hint: is right
    """

    def merge(out, lse, more, more_lse, given=merge):
        both = [x.mean(-1, keepdim=True).expand_as(x) for x in (lse, more_lse)]
        return given(out, both[0], more, both[1])[0], torch.logaddexp(lse, more_lse)


def nan_to_zero():
    """All that is no number becomes 0, also what came in so.

    kind: odd
    hint: A NaN that goes in comes out
    """

    def merge(out, lse, more, more_lse, given=merge):
        merged, total = given(out, lse, more, more_lse)
        return merged.nan_to_num(0.0), total
