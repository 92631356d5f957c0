"""Lab 11, the slow program's diagnosis: each body, after the solution, is a wrong answer."""


def another_line():
    """A line above.

    kind: values
    hint: 7 of the 8 entries
    """

    def slow():
        return {
            "rank": 3,
            "line": 58,
            "cause": "health checks",
            "ms": 86,
            "message_line": 26,
            "message_cause": "one for each parameter",
            "message_calls": 9,
            "message_bytes": 4552,
        }


def another_cause():
    """A cause of another learner's.

    kind: values
    hint: 7 of the 8 entries
    """

    def slow():
        return {
            "rank": 3,
            "line": 60,
            "cause": "data loading",
            "ms": 86,
            "message_line": 26,
            "message_cause": "one for each parameter",
            "message_calls": 9,
            "message_bytes": 4552,
        }


def cause_in_own_words():
    """A cause that is not in the list.

    kind: values
    hint: should be one of
    """

    def slow():
        return {
            "rank": 3,
            "line": 60,
            "cause": "it is just slow",
            "ms": 86,
            "message_line": 26,
            "message_cause": "one for each parameter",
            "message_calls": 9,
            "message_bytes": 4552,
        }


def rank_as_text():
    """The rank, as a text.

    kind: types
    hint: should be a number
    """

    def slow():
        return {
            "rank": "rank 3",
            "line": 60,
            "cause": "health checks",
            "ms": 86,
            "message_line": 26,
            "message_cause": "one for each parameter",
            "message_calls": 9,
            "message_bytes": 4552,
        }


def a_list():
    """Values without keys.

    kind: types
    hint: should be a dictionary
    """

    def slow():
        return [3, 60, "health checks", 86, 26, "one for each parameter", 9, 4552]


def all_ranks():
    """Every rank, in a list.

    kind: types
    hint: should be a number
    """

    def slow():
        return {
            "rank": [0, 1, 2, 3],
            "line": 60,
            "cause": "health checks",
            "ms": 86,
            "message_line": 26,
            "message_cause": "one for each parameter",
            "message_calls": 9,
            "message_bytes": 4552,
        }


def no_line():
    """Not a word of the line.

    kind: part
    hint: does not say line
    """

    def slow():
        return {
            "rank": 3,
            "cause": "health checks",
            "ms": 86,
            "message_line": 26,
            "message_cause": "one for each parameter",
            "message_calls": 9,
            "message_bytes": 4552,
        }


def nothing():
    """An empty dictionary.

    kind: part
    hint: does not say
    """

    def slow():
        return {}


def another_number():
    """The answers of learner 12.

    kind: constants
    hint: entries of
    """

    def slow():
        return {
            "rank": 2,
            "line": 72,
            "cause": "checkpoints",
            "ms": 37,
            "message_line": 67,
            "message_cause": "barriers",
            "message_calls": 3,
            "message_bytes": 5664,
        }


def asks_the_riddle():
    """Takes the answer from where the riddle is made.

    kind: library
    hint: is not written out
    """

    def slow():
        from labs.support.profiling import programs

        return next(iter(programs.slow(NUMBER).truth.values()))


def asks_in_disguise():
    """The same, by a name that is put together.

    kind: library
    hint: is not written out
    """

    def slow():
        import importlib

        riddles = importlib.import_module(".".join(["labs", "support", "profiling", "programs"]))
        return next(iter(riddles.slow(NUMBER).truth.values()))


def guesses():
    """Another rank every time.

    kind: luck
    hint: is not written out
    """

    asked = []

    def slow(solution=slow):
        asked.append(1)
        return solution() | {"rank": len(asked)}


def measures_for_ever():
    """No end.

    kind: end
    hint: is not written out
    """

    def slow():
        import time

        while True:
            time.sleep(0.01)


def leaves():
    """Leaves the program.

    kind: end
    hint: is not written out
    """

    def slow():
        raise SystemExit


def half_the_time():
    """43 of 86 ms.

    kind: values
    hint: 7 of the 8 entries
    """

    def slow():
        return {
            "rank": 3,
            "line": 60,
            "cause": "health checks",
            "ms": 43,
            "message_line": 26,
            "message_cause": "one for each parameter",
            "message_calls": 9,
            "message_bytes": 4552,
        }


def seconds():
    """Seconds in place of ms.

    kind: types
    hint: 7 of the 8 entries
    """

    def slow():
        return {
            "rank": 3,
            "line": 60,
            "cause": "health checks",
            "ms": 0.086,
            "message_line": 26,
            "message_cause": "one for each parameter",
            "message_calls": 9,
            "message_bytes": 4552,
        }


def who_waits():
    """The rank that waits longest.

    kind: odd
    hint: 7 of the 8 entries
    """

    def slow():
        return {
            "rank": 1,
            "line": 60,
            "cause": "health checks",
            "ms": 86,
            "message_line": 26,
            "message_cause": "one for each parameter",
            "message_calls": 9,
            "message_bytes": 4552,
        }


def all_steps():
    """The calls of eight steps.

    kind: sizes
    hint: 7 of the 8 entries
    """

    def slow():
        return {
            "rank": 3,
            "line": 60,
            "cause": "health checks",
            "ms": 86,
            "message_line": 26,
            "message_cause": "one for each parameter",
            "message_calls": 72,
            "message_bytes": 4552,
        }


def fp32():
    """Four bytes a number.

    kind: types
    hint: 7 of the 8 entries
    """

    def slow():
        return {
            "rank": 3,
            "line": 60,
            "cause": "health checks",
            "ms": 86,
            "message_line": 26,
            "message_cause": "one for each parameter",
            "message_calls": 9,
            "message_bytes": 2276,
        }


def not_a_number():
    """NaN, which is near nothing.

    kind: values
    hint: is not written out
    """

    def slow(solution=slow):
        return solution() | {"ms": float("nan")}
