"""Counts and measurements of one process, and of this machine.

traffic       Traffic: every collective, send and receive, with its bytes
memory        Memory: what memory holds at every moment of a step, by kind
timing        the seconds, FLOPs and bytes of a function; the cost of a link
profile       Span: when a rank computes and communicates; tracing writes trace files
traces        trace files of all ranks: where each step's time goes, and which rank is late
findings      report: what costs the most in these traces, and how to fix it
divergence    Watch: the step, layer and rank at which values go wrong
machine       the hardware of this machine, and how much of it a process may use
reference     figures for a GPU that `make gpu` has measured and stored
environment   check_environment: can the workshop run here, and if not, what to fix

Import from the files: `environment` must be able to say that torch is missing.
"""
