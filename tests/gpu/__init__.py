"""What only a GPU can show, in one command: `make gpu`.

    python -m tests.gpu                      all parts; fills docs/reference/<gpu>.json
    python -m tests.gpu --only adamw mfu     these parts; what it holds of the others stays
    python -m tests.gpu --list               the parts and their limits
    python -m tests.gpu --rehearse --out r.json          tiny, on the CPU: do the parts work at all?
    python -m tests.gpu.child tests.gpu.kernels:adamw    one part by hand, with all that it says

__main__    runs the parts, one after the other, and stores what they found
child       the process of one part
machine     what the GPU is: name, driver, peaks by measurement
training    utils.train on one GPU and on several, memory against the planner, MFU by technique
one_card    two ranks on one card over gloo
peers       the training step beside nanoGPT's and transformers'
decode      decode steps beside transformers' and gpt-fast's, and the planner's prediction
profiles    the allocator's record of a step, NVML beside a trace, ncu
kernels     AdamW and RMSNorm beside the copy and their peers
shape       the matrix products of models of equal parameters but different shapes
serving     the engine's tokens and its speed
course      the tests that skip without a GPU, and the lessons

A part is a generator: it yields (name, figures) as soon as a row is measured, so that what a part
found before its limit is kept. A row that cannot be is {"failed": sentence} or {"absent": sentence}
(a package that is missing, a model that does not fit). No part but the lessons needs a notebook's
packages or Triton's client: torch, Triton, transformers and pytest are enough.
"""
