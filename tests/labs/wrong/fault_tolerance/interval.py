"""Lab 13, interval: each body, written after the solution, is a wrong answer."""


def times_added():
    """Adds the times between failures, where failures a second add up.

    kind: values
    hint: the times between them do not
    """

    def between_failures(observed, parts):
        return sum(
            3600 * observed[kind][1] / observed[kind][0] / count if observed[kind][0] else math.inf
            for kind, count in parts.items()
        )


def one_part_each():
    """Forgets how many parts of each kind there are.

    kind: values
    hint: Failures a second add up over all parts
    """

    def between_failures(observed, parts):
        rate = sum(observed[kind][0] / (3600 * observed[kind][1]) for kind in parts)
        return 1 / rate if rate else math.inf


def in_hours():
    """Gives hours.

    kind: values
    hint: Failures a second add up
    """

    seconds = between_failures

    def between_failures(observed, parts):
        return seconds(observed, parts) / 3600


def all_that_was_observed():
    """Wants a number of each kind that was observed.

    kind: part
    hint: KeyError
    """

    def between_failures(observed, parts):
        rate = sum(parts[kind] * n / (3600 * hours) for kind, (n, hours) in observed.items())
        return 1 / rate if rate else math.inf


def nothing_fails():
    """Divides by the rate of parts that never failed.

    kind: odd
    hint: ZeroDivisionError
    """

    def between_failures(observed, parts):
        return 1 / sum(
            count * observed[kind][0] / (3600 * observed[kind][1]) for kind, count in parts.items()
        )


def uses_them_up():
    """Takes the kinds out of what it was given.

    kind: inputs
    hint: has changed what it was given | KeyError
    """

    def between_failures(observed, parts):
        rate = 0.0
        for kind in list(parts):
            failures, hours = observed[kind]
            rate += parts.pop(kind) * failures / (3600 * hours)
        return 1 / rate if rate else math.inf


def without_restarts():
    """A failure costs nothing but what is lost.

    kind: part
    hint: the share without restarts
    """

    whole = lost_share

    def lost_share(interval, save, restart, between):
        return whole(interval, save, 0.0, between)


def first_order():
    """The formula of section 1, which takes failures as rare.

    kind: sizes
    hint: first-order formula
    """

    def lost_share(interval, save, restart, between):
        longer = save / interval + (interval + save) / (2 * between) + restart / between
        return 1 - 1 / (1 + longer)


def of_the_computing():
    """How much longer, in place of the share of the whole.

    kind: values
    hint: The share is of the whole time
    """

    share = lost_share

    def lost_share(interval, save, restart, between):
        kept = 1 - share(interval, save, restart, between)
        return 1 / kept - 1


def saves_for_nothing():
    """Saving counts as computing.

    kind: values
    hint: expected time of one interval
    """

    def lost_share(interval, save, restart, between):
        expected = between * math.exp(restart / between) * math.expm1((interval + save) / between)
        return 1 - (interval + save) / expected


def young():
    """Young's interval, which is too long where failures are not rare.

    kind: sizes
    hint: It is Young's interval
    """

    def best_interval(save, between):
        return math.sqrt(2 * save * between)


def without_the_two():
    """The root without its 2.

    kind: values
    hint: which way does it fall
    """

    def best_interval(save, between):
        return math.sqrt(save * between)


def as_long_as_a_failure():
    """Once in the time between two failures.

    kind: values
    hint: longer than needed
    """

    def best_interval(save, between):
        return between


def ten_minutes():
    """What is usual.

    kind: constants
    hint: longer than needed
    """

    def best_interval(save, between):
        return 600.0


def whole_minutes():
    """Minutes, rounded.

    kind: sizes
    hint: longer than needed | should be seconds above 0
    """

    exact = best_interval

    def best_interval(save, between):
        return 60.0 * round(exact(save, between) / 60)


def too_few_tried():
    """Tries powers of four.

    kind: luck
    hint: longer than needed
    """

    def best_interval(save, between):
        return min((4.0**k for k in range(-4, 12)), key=lambda x: _seconds(x, save, between))


def remembers():
    """Keeps its first answer.

    kind: constants
    hint: longer than needed
    """

    exact, kept = best_interval, []

    def best_interval(save, between):
        kept.append(exact(save, between))
        return kept[0]


def from_the_planner():
    """The planner's formula.

    kind: library
    hint: done by hand
    """

    from utils.planner import failures

    def best_interval(save, between):
        return failures.daly(save, between)


def no_failure_while_saving():
    """Failures spare the run while it saves.

    kind: part
    hint: expected time of one interval
    """

    def lost_share(interval, save, restart, between):
        expected = save + between * math.exp(restart / between) * math.expm1(interval / between)
        return 1 - interval / expected


def no_failure_while_restarting():
    """A restart goes through at the first attempt.

    kind: part
    hint: expected time of one interval
    """

    def lost_share(interval, save, restart, between):
        return 1 - interval / ((between + restart) * math.expm1((interval + save) / between))


def asks_the_check():
    """The check's own list of intervals.

    kind: library
    hint: done by hand
    """

    def best_interval(save, between):
        from labs.support.fault_tolerance import check_interval

        return min(check_interval._around(save, between), key=lambda x: _seconds(x, save, between))
