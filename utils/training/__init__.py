"""The training loop, what it is told, and what one step of it does.

train        the loop, and the command `python -m utils.train`
config       its options, which of them go together, and the command line
step         one step in plain PyTorch; `deepspeed` has the same methods on DeepSpeed
optimizer    Muon and AdamW, stepped as one
checkpoint   saved and resumed on any number of ranks
slow_runs    small runs, each slow for one planted reason: the cases of lesson 11
torchft_replica   replicas that go on when one of them is killed, by a library: lesson 13
"""
