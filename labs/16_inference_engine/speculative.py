"""Lab 16, exercise d: which drafted tokens are kept.

A small model, the *draft*, has proposed k tokens in turn; the large one, the *target*, has read all
of them in one pass. The rule of speculative sampling (Leviathan et al. 2023, arXiv:2211.17192,
section 2.3) decides which to keep, so that the tokens have the target's distribution, whatever the
draft proposed.
"""


def verify(drafted, q, p, uniforms, draw):
    """The tokens to keep, a list of int: the accepted ones and one more, which is drawn.

    drafted    (k,) int64, the proposed tokens; k may be 0
    q          (k, V): q[i] is the draft's distribution, from which drafted[i] was drawn
    p          (k+1, V): p[i] is the target's distribution after drafted[:i]
    uniforms   (k,): random numbers from [0, 1)
    draw       draw(distribution) -> int: a token drawn from a distribution (V,) that sums to 1

    Token x = drafted[i] is accepted with probability min(1, p[i, x] / q[i, x]), that is, if
    uniforms[i] is below it. At the first token that is rejected, the last token comes from the part
    of p[i] that exceeds q[i]: max(p[i] - q[i], 0), normalized to sum to 1; the rest of the draft is
    dropped. If all are accepted, the last token comes from p[k]. `draw` is called exactly once, and
    `uniforms` and `draw` are the only sources of randomness.

    fp32 or fp64. Rows of p and q may be one-hot, as in greedy decoding. The arguments are not
    changed.
    """
    raise NotImplementedError("accept or reject in order, then draw one more token")
