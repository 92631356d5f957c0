"""Lab 13, plan: each body, written after the solution, is a wrong answer."""


def always_the_disk():
    """Never uses the memory.

    kind: part
    hint: What would a cheap one be worth
    """

    def best_plan(memory, disk, restart, between, light):
        return best_interval(disk, between), 1


def seldom_the_disk():
    """As seldom as it may be.

    kind: constants
    hint: what is a checkpoint in memory worth | longer than needed
    """

    def best_plan(memory, disk, restart, between, light):
        return best_interval(memory, between), 64


def one_in_ten():
    """What is usual.

    kind: constants
    hint: what is a checkpoint in memory worth | longer than needed
    """

    def best_plan(memory, disk, restart, between, light):
        return best_interval((9 * memory + disk) / 10, between), 10


def two_runs():
    """Each kind of checkpoint as if the other one were not there.

    kind: values
    hint: longer than needed
    """

    def best_plan(memory, disk, restart, between, light):
        often = best_interval(memory, between / max(light, 1e-3))
        seldom = best_interval(disk, between / max(1 - light, 1e-3))
        return often, max(1, min(64, round(seldom / often)))


def all_failures_light():
    """Takes all failures for light ones.

    kind: values
    hint: what is a checkpoint in memory worth | longer than needed
    """

    best = best_plan

    def best_plan(memory, disk, restart, between, light):
        return best(memory, disk, restart, between, 0.99)


def all_failures_heavy():
    """Takes all failures for heavy ones.

    kind: values
    hint: What would a cheap one be worth
    """

    best = best_plan

    def best_plan(memory, disk, restart, between, light):
        return best(memory, disk, restart, between, 0.0)


def the_other_way_round():
    """The number first.

    kind: values
    hint: not a whole number from 1 to 64 | longer than needed
    """

    best = best_plan

    def best_plan(memory, disk, restart, between, light):
        return best(memory, disk, restart, between, light)[::-1]


def the_interval_alone():
    """Without the number.

    kind: part
    hint: not (interval, every)
    """

    best = best_plan

    def best_plan(memory, disk, restart, between, light):
        return best(memory, disk, restart, between, light)[0]


def between_two_on_the_disk():
    """The interval of all together.

    kind: values
    hint: longer than needed
    """

    best = best_plan

    def best_plan(memory, disk, restart, between, light):
        interval, every = best(memory, disk, restart, between, light)
        return interval * every, every


def no_end():
    """Tries intervals until one is perfect.

    kind: end
    hint: no end
    """

    def best_plan(memory, disk, restart, between, light):
        while True:
            pass


def restarts_in_no_time():
    """As if nothing failed in a restart.

    kind: part
    hint: what does one in the restart there
    """

    best = best_plan

    def best_plan(memory, disk, restart, between, light):
        return best(memory, disk, 0.0, between, light)


def each_kind_alone():
    """The best interval of each kind for the failures that it is meant for.

    kind: values
    hint: longer than needed
    """

    def best_plan(memory, disk, restart, between, light):
        short = best_interval(memory, between / max(light, 0.01))
        long = best_interval(disk, between / (1 - light))
        return short, min(64, max(1, round(long / short)))


def light_ones_in_a_restart_go_back():
    """Takes each failure in a restart back to the disk.

    kind: part
    hint: what does one in the restart there
    """

    def _stretch(interval, every, memory, disk, restart, between, light):
        up, heavy = math.exp(-restart / between), 1 - light
        u, a, b = between * (1 - up), 0.0, 0.0  # back[i] = u + up · running[i] + (1 − up) · back[0]
        for number in reversed(range(every)):
            whole = math.exp(-(interval + (disk if number == every - 1 else memory)) / between)
            t, fails = between * (1 - whole), 1 - whole
            rest = 1 - fails * light * up
            a = (t + whole * a + fails * light * u) / rest
            b = (whole * b + fails * heavy + fails * light * (1 - up)) / rest
        c = up * (1 - b)
        return (a + b * (u + up * a) / c) / (every * interval) if c > 1e-12 else math.inf


def both_are_paid():
    """What goes to the disk goes to the memory, too.

    kind: part
    hint: What would a cheap one | longer than needed
    """

    one_of_them = _stretch

    def _stretch(interval, every, memory, disk, restart, between, light):
        return one_of_them(interval, every, memory, memory + disk, restart, between, light)


def asks_the_check():
    """The check's own expected time.

    kind: library
    hint: done by hand
    """

    def best_plan(memory, disk, restart, between, light):
        from labs.support.fault_tolerance.check_interval import stretch_of

        plans = []
        for every in range(1, 65):
            base = best_interval((memory * (every - 1) + disk) / every, between)
            for factor in np.geomspace(0.25, 8, 24):
                plan = (factor * base, every)
                plans.append((stretch_of(*plan, memory, disk, restart, between, light), *plan))
        return min(plans)[1:]
