"""What stands behind `make`.

setup, pip    the environment in .venv: standard library only, readable by any Python 3
book          the book and the slides from the stored notebooks, in an environment of their own
lab           JupyterLab on the table of lessons
notebooks     which there are, how one is run and stored; refresh, course: all of them
labs          the learner's copies, from the solutions
lock          requirements.in -> requirements.txt
"""
