"""Seats for a class on one large Linux machine: `make hub` (docs/class/hub.md).

JupyterHub handles names, passwords, pages, starting and stopping. This package makes the seats of
this course: a learner's own files, network, processes and share of the machine.

accounts    names and passwords; templates/ is the login page
limits      memory, cores and processes of a seat, held by the kernel (control groups)
seat        the spawner: JupyterLab in its own namespaces (bubblewrap), on the learner's own copy of
            the course
proxy       Node.js and JupyterHub's proxy, which npm installs, in .venv/hub
__main__    the command behind `make hub`
"""
