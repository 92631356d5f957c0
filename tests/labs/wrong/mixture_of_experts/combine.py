"""Lab 09, combine: each body, written after the solution, is a wrong answer."""


def left_by_expert():
    """Sends the results back expert by expert, not rank by rank.

    kind: values
    hint: Undo the steps of dispatch
    """

    def combine(results, weights, way):
        rows = AllToAll.apply(results, way.receive, way.send)
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        return (weights[..., None] * choices).sum(dim=1)


def left_in_order():
    """Takes the rows as they come home for those of the tokens in turn.

    kind: values
    hint: the layer's output
    """

    def combine(results, weights, way):
        arrived = results[way.by_expert.argsort()]
        rows = AllToAll.apply(arrived, way.receive, way.send)
        return (weights[..., None] * rows.unflatten(0, weights.shape)).sum(dim=1)


def mean():
    """Takes the mean of a token's results.

    kind: values
    hint: of the results: weigh each
    """

    _combine = combine

    def combine(results, weights, way):
        return _combine(results, torch.ones_like(weights) / weights.shape[1], way)


def no_way_back_for_gradients():
    """Brings the results home past autograd.

    kind: part
    hint: Rows must travel through AllToAll.apply on both ways
    """

    def combine(results, weights, way):
        arrived = results[way.by_expert.argsort()]
        rows = results.new_empty(sum(way.send), results.shape[1])
        dist.all_to_all_single(rows, arrived.detach(), way.send, way.receive)
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        return (weights[..., None] * choices).sum(dim=1)


def normalized_again():
    """Makes the weights add up to one, although the router has decided.

    kind: values
    hint: the layer's output
    """

    _combine = combine

    def combine(results, weights, way):
        return _combine(results, weights / weights.sum(dim=1, keepdim=True), way)


def order_again():
    """Applies the order once more in place of undoing it.

    kind: values
    hint: the layer's output
    """

    def combine(results, weights, way):
        arrived = results[way.by_expert.argsort()]
        rows = AllToAll.apply(arrived, way.receive, way.send)
        return (weights[..., None] * rows[way.order].unflatten(0, weights.shape)).sum(dim=1)


def plain_sum():
    """Adds the results up without their weights.

    kind: values
    hint: weigh each with its weight
    """

    _combine = combine

    def combine(results, weights, way):
        return _combine(results, torch.ones_like(weights), way)


def sorted_twice():
    """Sorts by expert again in place of undoing it.

    kind: values
    hint: Undo the steps of dispatch
    """

    def combine(results, weights, way):
        rows = AllToAll.apply(results[way.by_expert], way.receive, way.send)
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        return (weights[..., None] * choices).sum(dim=1)


def to_everybody():
    """Every rank gets the results of all, and takes its own.

    kind: communication
    hint: one all-to-all will do
    """

    _combine = combine

    def combine(results, weights, way):
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, results.detach())
        return _combine(results, weights, way)


def way_not_turned():
    """Sends back as many rows as were sent out.

    kind: values
    hint: Split sizes
    """

    def combine(results, weights, way):
        arrived = results[way.by_expert.argsort()]
        rows = AllToAll.apply(arrived, way.send, way.receive)
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        return (weights[..., None] * choices).sum(dim=1)


def weights_past_autograd():
    """Weighs with copies of the weights.

    kind: part
    hint: Does the router get a gradient
    """

    _combine = combine

    def combine(results, weights, way):
        return _combine(results, weights.detach(), way)


def zeros_times_nan():
    """Mixes by a matrix with zeros for all other tokens: 0 · NaN is NaN.

    kind: odd
    hint: is nan
    """

    def combine(results, weights, way):
        arrived = results[way.by_expert.argsort()]
        rows = AllToAll.apply(arrived, way.receive, way.send)
        k = weights.shape[1]
        mix = rows.new_zeros(len(weights), len(rows))
        mix[way.order // k, torch.arange(len(rows))] = 1
        return mix @ (rows * weights.flatten()[way.order, None])


def two_choices():
    """Adds two results up, however many there are.

    kind: constants
    hint: the layer's output
    """

    def combine(results, weights, way):
        arrived = results[way.by_expert.argsort()]
        rows = AllToAll.apply(arrived, way.receive, way.send)
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        return (weights[..., None] * choices)[:, :2].sum(dim=1)


def last_way():
    """Takes the way of the first dispatch for all.

    kind: constants
    hint: with 2 ranks
    """

    ways = []
    _combine = combine

    def combine(results, weights, way):
        ways.append(way)
        return _combine(results, weights, ways[0])


def weighs_in_place():
    """Weighs the caller's results.

    kind: inputs
    hint: results is not what it was
    """

    _combine = combine

    def combine(results, weights, way):
        y = _combine(results, weights, way)
        results.data.mul_(0.5)
        return y


def softmax_of_the_weights():
    """Changes the router's weights for good.

    kind: inputs
    hint: weights is not what it was
    """

    _combine = combine

    def combine(results, weights, way):
        y = _combine(results, weights, way)
        weights.data.copy_(weights.softmax(dim=1))
        return y


def idle_rank_returns():
    """A rank without tokens has nothing to wait for.

    kind: odd
    hint: with 2 ranks
    """

    _combine = combine

    def combine(results, weights, way):
        if not len(weights):
            return results.new_zeros(0, results.shape[1]) + 0 * results.sum()
        return _combine(results, weights, way)


def early():
    """Uses the results before they are home.

    kind: luck
    hint: is each waited for
    """

    class Home(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, way):
            ctx.way = way
            home = rows.new_zeros(sum(way.send), rows.shape[1])
            dist.all_to_all_single(home, rows.contiguous(), way.send, way.receive, async_op=True)
            return home

        @staticmethod
        def backward(ctx, gradient):
            back = gradient.new_zeros(sum(ctx.way.receive), gradient.shape[1])
            dist.all_to_all_single(back, gradient.contiguous(), ctx.way.receive, ctx.way.send)
            return back, None

    def combine(results, weights, way):
        rows = Home.apply(results[way.by_expert.argsort()], way)
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        return (weights[..., None] * choices).sum(dim=1)


def grows():
    """Keeps the outputs of all steps.

    kind: memory
    hint: What is kept that nobody needs
    """

    outputs = []
    _combine = combine

    def combine(results, weights, way):
        y = _combine(results, weights, way)
        outputs.append(y.detach())
        return y


def in_float32():
    """Adds up in single precision.

    kind: types
    hint: is right
    """

    _combine = combine

    def combine(results, weights, way):
        return _combine(results.float(), weights.float(), way)


def weights_travel():
    """Asks for the weights of all ranks besides.

    kind: communication
    hint: one all-to-all will do
    """

    _combine = combine

    def combine(results, weights, way):
        sizes = torch.tensor([len(weights)])
        dist.all_reduce(sizes)
        return _combine(results, weights, way)


def four_ranks():
    """From the fifth rank on, results come home unweighted.

    kind: sizes
    hint: with 5 ranks
    """

    _combine = combine

    def combine(results, weights, way):
        if len(way.send) > 4:
            weights = weights / weights.detach()
        return _combine(results, weights, way)


def without_the_experts_gradient():
    """The router learns and the experts do not.

    kind: part
    hint: experts
    """

    class Home(AllToAll):
        @staticmethod
        def backward(ctx, gradient):
            returned, *others = AllToAll.backward(ctx, gradient)
            return torch.zeros_like(returned), *others

    def combine(results, weights, way):
        rows = Home.apply(results[way.by_expert.argsort()], way.receive, way.send)
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        return (weights[..., None] * choices).sum(dim=1)


def torchs_own():
    """Brings the rows home by torch's own exchange with a gradient.

    kind: library
    hint: that is the library
    """

    def combine(results, weights, way):
        home = results.new_empty(sum(way.send), results.shape[1])
        rows = torch.distributed.nn.functional.all_to_all_single(
            home, results[way.by_expert.argsort()], way.send, way.receive
        )
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        return (weights[..., None] * choices).sum(dim=1)


def way_turned_round():
    """Leaves the inverses in the way: a second combine with it is wrong.

    kind: inputs
    hint: way.order is not what it was before the call
    """

    def combine(results, weights, way):
        way.by_expert, way.order = way.by_expert.argsort(), way.order.argsort()
        rows = AllToAll.apply(results[way.by_expert], way.receive, way.send)
        choices = rows[way.order].unflatten(0, weights.shape)
        return (weights[..., None] * choices).sum(dim=1)


def no_weight_no_gradient():
    """Leaves out choices of weight 0: their weights have no gradient.

    kind: odd
    hint: the gradient of the weights
    """

    def combine(results, weights, way):
        rows = AllToAll.apply(results[way.by_expert.argsort()], way.receive, way.send)
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        return torch.where(weights[..., None] == 0, 0, weights[..., None] * choices).sum(dim=1)


def no_weight_no_message():
    """A rank whose weights are all 0 does not ask for the results.

    kind: odd
    hint: no gradient can come back | did not complete | does not fit
    """

    _combine = combine

    def combine(results, weights, way):
        if weights.numel() and not weights.any():
            return results.new_zeros(len(weights), results.shape[1])
        return _combine(results, weights, way)


def four_choices():
    """Adds up four results of a token, however many there are.

    kind: sizes
    hint: the layer's output | the gradient of the weights
    """

    def combine(results, weights, way):
        rows = AllToAll.apply(results[way.by_expert.argsort()], way.receive, way.send)
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        weighed = weights[..., None] * choices
        return sum(weighed[:, k] for k in range(min(4, weights.shape[1])))
