"""The room: an instructor's board (`make class`) and what a learner's lab reports to it.

reports     what a report is, for both sides: nothing else leaves a lab, nothing else is taken
join        the learner's consent and alias; `make lab CLASS=…` asks once
reporter    the process beside JupyterLab that sends what the ledger says
store       what the board has, in SQLite
address     by which address others reach what listens here
room        the same in memory, as the page shows it; histograms of predictions
board       the board's pages and routes; page.html, page.css and page.js are its page
__main__    the command behind `make class`
"""
