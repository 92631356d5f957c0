"""The tasks: answers are true, questions are the same everywhere, and none is on both sides."""

import ast
import hashlib
import re
import sys

import pytest

from utils.prompts import Example
from utils.prompts.tasks import KINDS, NOUNS, TASKS, Task, is_held_out, task


@pytest.mark.parametrize("name", TASKS)
def test_questions_are_drawn_by_seed(name):
    of = TASKS[name].examples
    assert of(1, 30) == of(1, 40)[:30] != of(2, 30)
    assert of(0, 0) == []
    assert len({question.input for question in of(0, 40)}) == 40
    for question in of(0, 20):
        assert isinstance(question, Example) and question.input and question.output
        assert not question.choices or question.output in question.choices


@pytest.mark.parametrize("name", TASKS)
def test_no_question_is_on_both_sides(name):
    learned = {question.input for seed in range(3) for question in TASKS[name].examples(seed, 40)}
    asked = TASKS[name].examples(0, 40, held_out=True)
    assert learned.isdisjoint(question.input for question in asked)
    assert all(is_held_out(question) for question in asked)


@pytest.mark.parametrize("name", TASKS)
def test_every_answer_comes_up_about_as_often(name):
    questions = TASKS[name].examples(0, 150)
    choices = questions[0].choices
    assert {question.choices for question in questions} == {choices}
    answers = [question.output for question in questions]
    assert TASKS[name].chance == (1 / len(choices) if choices else 0)
    assert all(answers.count(choice) > 75 / len(choices) for choice in choices)
    assert choices or len(set(answers)) > 30


def test_the_questions_are_the_same_on_every_python():
    # they depend only on random.Random and the word lists; changing a task changes this hash
    text = repr([q.input + q.output for t in TASKS.values() for q in t.examples(0, 20)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "1ef2576be70a1c48"


def test_too_many_questions_are_refused():
    with pytest.raises(ValueError, match=r"only about \d+ held-out questions: ask for fewer"):
        TASKS["kind"].examples(0, 5000, held_out=True)
    with pytest.raises(ValueError, match="count -1 is below 0"):
        TASKS["kind"].examples(0, -1)
    with pytest.raises(ValueError, match=r"task 'kinds' is not one of .*kind"):
        task("kinds")
    assert task("kind") is TASKS["kind"] and isinstance(task("kind"), Task)


# ---- the answers are true


class Holder:
    """An object whose every attribute is `value`."""

    def __init__(self, value):
        self.__dict__["value"] = value

    def __getattr__(self, name):
        return self.value


class NoKeys(dict):
    """A hashable empty dictionary."""

    __hash__ = object.__hash__


MEANING = {  # values of a line's names and of `self` with which it raises
    "KeyError": (NoKeys(), Holder(NoKeys())),
    "ValueError": ("text", Holder([])),
    "ImportError": (None, None),
    "OSError": ("/no/such/folder/at/all", None),
    "AttributeError": (object(), object()),
}


def test_except_lines_raise_what_they_are_said_to_raise():
    import builtins
    import os

    for question in TASKS["except"].examples(0, 150):
        kind, line = question.output.strip(), question.input.split("\n")[1].strip()
        names = {node.id for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Name)}
        names -= {"self", "os", *dir(builtins)} - set(NOUNS)
        scope = {"os": os}
        exec(f"def run(self, {', '.join(sorted(names))}):\n    {line}", scope)
        meaning, me = MEANING[kind]
        with pytest.raises(getattr(builtins, kind)):
            scope["run"](me, **dict.fromkeys(names, meaning))


def test_types_are_those_that_python_says():
    for question in TASKS["type"].examples(0, 100):
        literal = re.search(r"type\((.*)\)\n", question.input)[1]
        assert type(ast.literal_eval(literal)).__name__ == question.output


def test_kinds_of_names():
    import builtins
    import keyword

    assert all(keyword.iskeyword(name) for name in KINDS["keyword"])
    for name in KINDS["exception"]:
        assert issubclass(getattr(builtins, name), Exception)
    for name in KINDS["function"]:
        assert callable(getattr(builtins, name))
    assert set(KINDS["module"]) <= sys.stdlib_module_names
    words = [name for names in KINDS.values() for name in names]
    assert len(words) == len(set(words))


def test_brackets_close_the_innermost():
    for question in TASKS["brackets"].examples(0, 100):
        rest = re.sub(r"[^()\[\]{}]", "", question.input)
        while re.search(r"\(\)|\[\]|\{\}", rest):
            rest = re.sub(r"\(\)|\[\]|\{\}", "", rest)
        assert {"(": ")", "[": "]", "{": "}"}[rest[-1]] == question.output
        closed = question.input + "".join({"(": ")", "[": "]", "{": "}"}[b] for b in rest[::-1])
        ast.parse(closed.strip())


def test_guards_are_python_that_raises():
    for question in TASKS["guard"].examples(0, 60):
        tree = ast.parse("if 1:\n" + question.input + question.output)
        assert isinstance(tree.body[0].body[0].body[0], ast.Raise)
        about_type = re.search(r"isinstance|callable|hasattr|type\(", question.input)
        assert question.output == (" TypeError" if about_type else " ValueError")
