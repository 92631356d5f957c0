"""The room: an instructor's board (`make class`) and what a learner's lab reports to it.

reports     the form of a report, for both sides: nothing else leaves a lab or is accepted
join        the learner's consent and alias; `make lab CLASS=…` asks once
reporter    the process next to JupyterLab that sends the ledger's content
store       the board's data, in SQLite
address     the address at which others reach this machine
room        the data in memory, as the page shows it; histograms of predictions
board       the board's pages and routes; page.html, page.css and page.js are its page
__main__    the command behind `make class`
"""
