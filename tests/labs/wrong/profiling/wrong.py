"""Lab 11, the wrong program's diagnosis: each body, after the solution, is a wrong answer."""


def another_line():
    """A line above.

    kind: values
    hint: 4 of the 5 entries
    """

    def wrong(solution=wrong):
        return solution() | {"line": solution()["line"] - 2}


def another_cause():
    """A cause of another learner's.

    kind: values
    hint: 4 of the 5 entries
    """

    def wrong(solution=wrong):
        return solution() | {"cause": "clipped alone"}


def cause_in_own_words():
    """A cause that is not in the list.

    kind: values
    hint: should be one of
    """

    def wrong(solution=wrong):
        return solution() | {"cause": "it is just slow"}


def rank_as_text():
    """The rank, as a text.

    kind: types
    hint: should be a number
    """

    def wrong(solution=wrong):
        return solution() | {"rank": "rank 3"}


def a_list():
    """Values without keys.

    kind: types
    hint: should be a dictionary
    """

    def wrong(solution=wrong):
        return list(solution().values())


def all_ranks():
    """Every rank, in a list.

    kind: types
    hint: should be a number
    """

    def wrong(solution=wrong):
        return solution() | {"rank": [0, 1, 2, 3]}


def no_line():
    """Not a word of the line.

    kind: part
    hint: does not say line
    """

    def wrong(solution=wrong):
        return {key: value for key, value in solution().items() if key != "line"}


def nothing():
    """An empty dictionary.

    kind: part
    hint: does not say
    """

    def wrong():
        return {}


def another_number():
    """The answers of learner 12.

    kind: constants
    hint: entries of
    """

    def wrong():
        return {"rank": 3, "step": 3, "name": None, "line": 76, "cause": "clipped alone"}


def asks_the_riddle():
    """Takes the answer from where the riddle is made.

    kind: library
    hint: that is the library
    """

    def wrong():
        from labs.support.profiling import programs

        return next(iter(programs.wrong(NUMBER).truth.values()))


def asks_in_disguise():
    """The same, by a name that is put together.

    kind: library
    hint: that is the library
    """

    def wrong():
        import importlib

        riddles = importlib.import_module(".".join(["labs", "support", "profiling", "programs"]))
        return next(iter(riddles.wrong(NUMBER).truth.values()))


def guesses():
    """Another rank every time.

    kind: luck
    hint: something else when it is asked again
    """

    asked = []

    def wrong(solution=wrong):
        asked.append(1)
        return solution() | {"rank": len(asked)}


def measures_for_ever():
    """No end.

    kind: end
    hint: endless loop
    """

    def wrong():
        import time

        while True:
            time.sleep(0.01)


def leaves():
    """Leaves the program.

    kind: end
    hint: leaves the program
    """

    def wrong():
        raise SystemExit


def a_step_later():
    """Where the loss shows it.

    kind: values
    hint: 4 of the 5 entries
    """

    def wrong(solution=wrong):
        return solution() | {"step": solution()["step"] + 1}


def one_of_many():
    """One parameter, where all are wrong.

    kind: part
    hint: 4 of the 5 entries
    """

    def wrong(solution=wrong):
        return solution() | {"name": "2.bias"}


def nobody():
    """No rank, where one is to blame.

    kind: odd
    hint: 4 of the 5 entries
    """

    def wrong(solution=wrong):
        return solution() | {"rank": None}
