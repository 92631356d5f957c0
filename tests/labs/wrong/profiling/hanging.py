"""Lab 11, the hanging program's diagnosis: each body, after the solution, is a wrong answer."""


def another_line():
    """A line above.

    kind: values
    hint: 3 of the 4 entries
    """

    def hanging():
        return {"rank": 2, "line": 90, "waits": 96, "cause": "calls it alone"}


def another_cause():
    """A cause of another learner's.

    kind: values
    hint: 3 of the 4 entries
    """

    def hanging():
        return {"rank": 2, "line": 92, "waits": 96, "cause": "leaves the loop"}


def cause_in_own_words():
    """A cause that is not in the list.

    kind: values
    hint: should be one of
    """

    def hanging():
        return {"rank": 2, "line": 92, "waits": 96, "cause": "it is just slow"}


def rank_as_text():
    """The rank, as a text.

    kind: types
    hint: should be a number
    """

    def hanging():
        return {"rank": "rank 3", "line": 92, "waits": 96, "cause": "calls it alone"}


def a_list():
    """Values without keys.

    kind: types
    hint: should be a dictionary
    """

    def hanging():
        return [2, 92, 96, "calls it alone"]


def all_ranks():
    """Every rank, in a list.

    kind: types
    hint: should be a number
    """

    def hanging():
        return {"rank": [0, 1, 2, 3], "line": 92, "waits": 96, "cause": "calls it alone"}


def no_line():
    """Not a word of the line.

    kind: part
    hint: does not say line
    """

    def hanging():
        return {"rank": 2, "waits": 96, "cause": "calls it alone"}


def nothing():
    """An empty dictionary.

    kind: part
    hint: does not say
    """

    def hanging():
        return {}


def another_number():
    """The answers of learner 12.

    kind: constants
    hint: entries of
    """

    def hanging():
        return {"rank": 2, "line": 85, "waits": 45, "cause": "decides alone"}


def asks_the_riddle():
    """Takes the answer from where the riddle is made.

    kind: library
    hint: is not written out
    """

    def hanging():
        from labs.support.profiling import programs

        return next(iter(programs.hanging(NUMBER).truth.values()))


def asks_in_disguise():
    """The same, by a name that is put together.

    kind: library
    hint: is not written out
    """

    def hanging():
        import importlib

        riddles = importlib.import_module(".".join(["labs", "support", "profiling", "programs"]))
        return next(iter(riddles.hanging(NUMBER).truth.values()))


def guesses():
    """Another rank every time.

    kind: luck
    hint: is not written out
    """

    asked = []

    def hanging(solution=hanging):
        asked.append(1)
        return solution() | {"rank": len(asked)}


def measures_for_ever():
    """No end.

    kind: end
    hint: is not written out
    """

    def hanging():
        import time

        while True:
            time.sleep(0.01)


def leaves():
    """Leaves the program.

    kind: end
    hint: is not written out
    """

    def hanging():
        raise SystemExit


def who_waits():
    """One of the three ranks that wait.

    kind: odd
    hint: 3 of the 4 entries
    """

    def hanging():
        return {"rank": 0, "line": 92, "waits": 96, "cause": "calls it alone"}


def waits_where_it_went():
    """The line in which the odd rank waits.

    kind: odd
    hint: 3 of the 4 entries
    """

    def hanging():
        return {"rank": 2, "line": 92, "waits": 24, "cause": "calls it alone"}
