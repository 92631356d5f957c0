"""Lab 09, combine: each body, written after the solution, is a wrong answer."""


def left_by_expert():
    """Sends the results back expert by expert, not rank by rank.

    hint: Undo the steps of dispatch
    """

    def combine(results, weights, way):
        rows = AllToAll.apply(results, way.receive, way.send)
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        return (weights[..., None] * choices).sum(dim=1)


def left_in_order():
    """Takes the rows as they come home for those of the tokens in turn.

    hint: the layer's outputs are not one rank's
    """

    def combine(results, weights, way):
        arrived = results[way.by_expert.argsort()]
        rows = AllToAll.apply(arrived, way.receive, way.send)
        return (weights[..., None] * rows.unflatten(0, weights.shape)).sum(dim=1)


def mean():
    """Takes the mean of a token's results.

    hint: This is the mean of the results
    """

    _combine = combine

    def combine(results, weights, way):
        return _combine(results, torch.ones_like(weights) / weights.shape[1], way)


def no_way_back_for_gradients():
    """Brings the results home past autograd.

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

    hint: the layer's outputs are not one rank's
    """

    _combine = combine

    def combine(results, weights, way):
        return _combine(results, weights / weights.sum(dim=1, keepdim=True), way)


def order_again():
    """Applies the order once more in place of undoing it.

    hint: the layer's outputs are not one rank's
    """

    def combine(results, weights, way):
        arrived = results[way.by_expert.argsort()]
        rows = AllToAll.apply(arrived, way.receive, way.send)
        return (weights[..., None] * rows[way.order].unflatten(0, weights.shape)).sum(dim=1)


def plain_sum():
    """Adds the results up without their weights.

    hint: weigh each with its weight
    """

    _combine = combine

    def combine(results, weights, way):
        return _combine(results, torch.ones_like(weights), way)


def sorted_twice():
    """Sorts by expert again in place of undoing it.

    hint: Undo the steps of dispatch
    """

    def combine(results, weights, way):
        rows = AllToAll.apply(results[way.by_expert], way.receive, way.send)
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        return (weights[..., None] * choices).sum(dim=1)


def to_everybody():
    """Every rank gets the results of all, and takes its own.

    hint: Each row goes to one rank only
    """

    _combine = combine

    def combine(results, weights, way):
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, results.detach())
        return _combine(results, weights, way)


def way_not_turned():
    """Sends back as many rows as were sent out.

    hint: Split sizes
    """

    def combine(results, weights, way):
        arrived = results[way.by_expert.argsort()]
        rows = AllToAll.apply(arrived, way.send, way.receive)
        choices = rows[way.order.argsort()].unflatten(0, weights.shape)
        return (weights[..., None] * choices).sum(dim=1)


def weights_past_autograd():
    """Weighs with copies of the weights.

    hint: Does the router get a gradient
    """

    _combine = combine

    def combine(results, weights, way):
        return _combine(results, weights.detach(), way)
