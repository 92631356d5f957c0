"""Lab 16, goal: each body, written after the solution, is a wrong answer."""


def as_text():
    """config.pbtxt has texts; the settings are numbers.

    kind: types
    hint: tp is '2', not a whole number
    """

    def settings():
        return {"tp": "2", "slots": "6", "queue": "12"}


def defaults():
    """The engine's defaults.

    kind: constants
    hint: MiB and a device has 12: 2.89 MiB of weights and 16 slots
    """

    def settings():
        return {"tp": 2, "slots": 16, "queue": 64}


def endless_queue():
    """Everybody may wait.

    kind: values
    hint: 0 are refused, 8 is the least: the last waits 5 turns
    """

    def settings():
        return {"tp": 2, "slots": 6, "queue": 1000}


def more_ranks_than_heads():
    """A head cannot be divided.

    kind: odd
    hint: the export refuses tp 4
    """

    def settings():
        return {"tp": 4, "slots": 12, "queue": 12}


def no_batch():
    """One request at a time, the others wait.

    kind: values
    hint: They come in groups of 1
    """

    def settings():
        return {"tp": 2, "slots": 1, "queue": 20}


def nobody_waits():
    """No queue: whoever finds no free slot is refused.

    kind: values
    hint: are refused: 6 can run and 0 wait
    """

    def settings():
        return {"tp": 2, "slots": 6, "queue": 0}


def one_device():
    """Enough slots, but everything on one device.

    kind: memory
    hint: a device has 12: 5.77 MiB of weights and 6 slots
    """

    def settings():
        return {"tp": 1, "slots": 6, "queue": 12}


def one_slot_too_many():
    """The weights were forgotten: 8 slots alone would fit.

    kind: memory
    hint: 8 slots of 1.25 MiB
    """

    def settings():
        return {"tp": 2, "slots": 8, "queue": 12}


def queue_forgotten():
    """A number is missing.

    kind: part
    hint: not a dictionary of tp, slots, queue
    """

    def settings():
        return {"tp": 2, "slots": 6}


def queue_of_all():
    """The queue alone would do for all 32.

    kind: values
    hint: A queue that is too long only hides
    """

    def settings():
        return {"tp": 2, "slots": 7, "queue": 32}


def short_queue():
    """The queue was chosen without the slots.

    kind: values
    hint: are refused: 4 can run and 8 wait
    """

    def settings():
        return {"tp": 2, "slots": 4, "queue": 8}


def three_slots():
    """Nearly enough slots.

    kind: values
    hint: They come in groups of 3
    """

    def settings():
        return {"tp": 2, "slots": 3, "queue": 16}


def what_one_device_holds():
    """What fits one device are two slots: two tokens a step.

    kind: sizes
    hint: They come in groups of 2
    """

    def settings():
        return {"tp": 1, "slots": 2, "queue": 18}


def leaves():
    """The settings end the program.

    kind: end
    hint: the code leaves the program
    """

    def settings():
        raise SystemExit({"tp": 2, "slots": 6, "queue": 12})


def yes():
    """True is no number of ranks.

    kind: types
    hint: tp is True, not a whole number
    """

    def settings():
        return {"tp": True, "slots": 2, "queue": 18}
