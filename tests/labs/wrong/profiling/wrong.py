"""Lab 11, the wrong program's diagnosis: each body, after the solution, is a wrong answer."""


def another_line():
    """A line above.

    kind: values
    hint: 4 of the 5 entries
    """

    def wrong():
        return {"rank": 0, "step": 5, "name": None, "line": 77, "cause": "step left out alone"}


def another_cause():
    """A cause of another learner's.

    kind: values
    hint: 4 of the 5 entries
    """

    def wrong():
        return {"rank": 0, "step": 5, "name": None, "line": 79, "cause": "clipped alone"}


def cause_in_own_words():
    """A cause that is not in the list.

    kind: values
    hint: should be one of
    """

    def wrong():
        return {"rank": 0, "step": 5, "name": None, "line": 79, "cause": "it is just slow"}


def rank_as_text():
    """The rank, as a text.

    kind: types
    hint: should be a number
    """

    def wrong():
        return {
            "rank": "rank 3",
            "step": 5,
            "name": None,
            "line": 79,
            "cause": "step left out alone",
        }


def a_list():
    """Values without keys.

    kind: types
    hint: should be a dictionary
    """

    def wrong():
        return [0, 5, None, 79, "step left out alone"]


def all_ranks():
    """Every rank, in a list.

    kind: types
    hint: should be a number
    """

    def wrong():
        return {
            "rank": [0, 1, 2, 3],
            "step": 5,
            "name": None,
            "line": 79,
            "cause": "step left out alone",
        }


def no_line():
    """Not a word of the line.

    kind: part
    hint: does not say line
    """

    def wrong():
        return {"rank": 0, "step": 5, "name": None, "cause": "step left out alone"}


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
    hint: is not written out
    """

    def wrong():
        from labs.support.profiling import programs

        return next(iter(programs.wrong(NUMBER).truth.values()))


def asks_in_disguise():
    """The same, by a name that is put together.

    kind: library
    hint: is not written out
    """

    def wrong():
        import importlib

        riddles = importlib.import_module(".".join(["labs", "support", "profiling", "programs"]))
        return next(iter(riddles.wrong(NUMBER).truth.values()))


def guesses():
    """Another rank every time.

    kind: luck
    hint: is not written out
    """

    asked = []

    def wrong(solution=wrong):
        asked.append(1)
        return solution() | {"rank": len(asked)}


def measures_for_ever():
    """No end.

    kind: end
    hint: is not written out
    """

    def wrong():
        import time

        while True:
            time.sleep(0.01)


def leaves():
    """Leaves the program.

    kind: end
    hint: is not written out
    """

    def wrong():
        raise SystemExit


def a_step_later():
    """Where the loss shows it.

    kind: values
    hint: 4 of the 5 entries
    """

    def wrong():
        return {"rank": 0, "step": 6, "name": None, "line": 79, "cause": "step left out alone"}


def one_of_many():
    """One parameter, where all are wrong.

    kind: part
    hint: 4 of the 5 entries
    """

    def wrong():
        return {"rank": 0, "step": 5, "name": "2.bias", "line": 79, "cause": "step left out alone"}


def nobody():
    """No rank, where one is to blame.

    kind: odd
    hint: 4 of the 5 entries
    """

    def wrong():
        return {"rank": None, "step": 5, "name": None, "line": 79, "cause": "step left out alone"}


def draws_it_again():
    """What is planted, drawn as it was when it was planted.

    kind: library
    hint: is not written out
    """

    def wrong():
        import random

        draw = random.Random(f"wrong {NUMBER}")
        draws = [draw.randrange(end) for end in (4, 7, 6, 7, 2, 10_000, 10, 2, 5, 4, 4)]
        cause = ("clipped alone", "step left out alone")[draws[-3] % 2]
        return {"rank": draws[-2], "step": 3 + draws[-1], "name": None, "line": 79, "cause": cause}
