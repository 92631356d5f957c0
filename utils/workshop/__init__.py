"""The code behind `make`.

setup, pip    the environment in .venv: standard library only, readable by any Python 3
book          the book and the slides from the stored notebooks, in their own environment
lab           JupyterLab on the table of lessons
notebooks     finding, running and storing notebooks; refresh, course: all of them
labs          the learner's copies, from the solutions
lock          requirements.in -> requirements.txt
"""
