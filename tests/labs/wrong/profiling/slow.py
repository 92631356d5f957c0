"""Lab 11, the slow program's diagnosis: each body, after the solution, is a wrong answer."""


def another_line():
    """A line above.

    kind: values
    hint: 7 of the 8 entries
    """

    def slow(solution=slow):
        return solution() | {"line": solution()["line"] - 2}


def another_cause():
    """A cause of another learner's.

    kind: values
    hint: 7 of the 8 entries
    """

    def slow(solution=slow):
        return solution() | {"cause": "data loading"}


def cause_in_own_words():
    """A cause that is not in the list.

    kind: values
    hint: should be one of
    """

    def slow(solution=slow):
        return solution() | {"cause": "it is just slow"}


def rank_as_text():
    """The rank, as a text.

    kind: types
    hint: should be a number
    """

    def slow(solution=slow):
        return solution() | {"rank": "rank 3"}


def a_list():
    """Values without keys.

    kind: types
    hint: should be a dictionary
    """

    def slow(solution=slow):
        return list(solution().values())


def all_ranks():
    """Every rank, in a list.

    kind: types
    hint: should be a number
    """

    def slow(solution=slow):
        return solution() | {"rank": [0, 1, 2, 3]}


def no_line():
    """Not a word of the line.

    kind: part
    hint: does not say line
    """

    def slow(solution=slow):
        return {key: value for key, value in solution().items() if key != "line"}


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
    hint: that is the library
    """

    def slow():
        from labs.support.profiling import programs

        return next(iter(programs.slow(NUMBER).truth.values()))


def asks_in_disguise():
    """The same, by a name that is put together.

    kind: library
    hint: that is the library
    """

    def slow():
        import importlib

        riddles = importlib.import_module(".".join(["labs", "support", "profiling", "programs"]))
        return next(iter(riddles.slow(NUMBER).truth.values()))


def guesses():
    """Another rank every time.

    kind: luck
    hint: something else when it is asked again
    """

    asked = []

    def slow(solution=slow):
        asked.append(1)
        return solution() | {"rank": len(asked)}


def measures_for_ever():
    """No end.

    kind: end
    hint: endless loop
    """

    def slow():
        import time

        while True:
            time.sleep(0.01)


def leaves():
    """Leaves the program.

    kind: end
    hint: leaves the program
    """

    def slow():
        raise SystemExit


def half_the_time():
    """43 of 86 ms.

    kind: values
    hint: 7 of the 8 entries
    """

    def slow(solution=slow):
        return solution() | {"ms": 43}


def seconds():
    """Seconds in place of ms.

    kind: types
    hint: 7 of the 8 entries
    """

    def slow(solution=slow):
        return solution() | {"ms": solution()["ms"] / 1000}


def who_waits():
    """The rank that waits longest.

    kind: odd
    hint: 7 of the 8 entries
    """

    def slow(solution=slow):
        return solution() | {"rank": 1}


def all_steps():
    """The calls of eight steps.

    kind: sizes
    hint: 7 of the 8 entries
    """

    def slow(solution=slow):
        return solution() | {"message_calls": 72}


def fp32():
    """Four bytes a number.

    kind: types
    hint: 7 of the 8 entries
    """

    def slow(solution=slow):
        return solution() | {"message_bytes": 2276}


def not_a_number():
    """NaN, which is near nothing.

    kind: values
    hint: 7 of the 8 entries
    """

    def slow(solution=slow):
        return solution() | {"ms": float("nan")}
