"""Measurements and tests that need a GPU, in one command: `make gpu`.

    python -m tests.gpu                      all parts; fills docs/reference/<gpu>.json
    python -m tests.gpu --only adamw mfu     these parts; the stored rows of the others stay
    python -m tests.gpu --list               the parts and their limits
    python -m tests.gpu --rehearse --out r.json          tiny, on the CPU: tries whether they run
    python -m tests.gpu.child tests.gpu.kernels:adamw    one part by hand, with all its output

__main__    runs the parts in turn and stores their results
child       the process of one part
machine     the GPU: name, driver, measured peaks
training    utils.train on one GPU and on several, memory against the planner, MFU per technique
one_card    two ranks on one card over gloo
peers       the training step, against nanoGPT's and transformers'
decode      decode steps, against transformers', gpt-fast's and the planner's prediction
profiles    the allocator's record of a step, NVML against a trace, ncu
kernels     AdamW and RMSNorm, against a copy and their peers
shape       the matrix products of models of equal size but different shapes
serving     the engine's tokens and speed
course      the tests that skip without a GPU, and the lessons

A part is a generator that yields (name, figures) as soon as a row is measured, so that rows before
its limit are kept. A row without figures is {"failed": sentence} or {"absent": sentence} (a missing
package, a model that does not fit). Except for the lessons, no part needs the notebooks' packages
or Triton's client: torch, Triton, transformers and pytest are enough.
"""
