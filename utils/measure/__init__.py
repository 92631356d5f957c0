"""Counts and measurements of one process, and of this machine.

traffic       Traffic: every collective, send and receive, with its bytes
memory        Memory: what is held at every moment of a step, by kind
timing        seconds, FLOPs, bytes of a piece of work; what a link costs
profile       Span: traces, computation beside communication; tracing writes them to files
traces        trace files of all ranks: where each step's time goes, and who is late
findings      report: what costs most in these traces, and what to mend
divergence    Watch: wrong numbers, the step, layer and rank where they begin
machine       what is in this machine, and how much of it a process may use
reference     figures of a card that `make gpu` has measured and stored
environment   check_environment: can the workshop run here, and if not, what to mend

Import from the files: `environment` must be able to say that torch is missing.
"""
