"""The training loop, its options, and the work of one step.

train        the loop, and the command `python -m utils.train`
config       its options, which combinations are allowed, and the command line
step         one step in plain PyTorch; `deepspeed` has the same methods on DeepSpeed
optimizer    Muon and AdamW, stepped as one
checkpoint   saving and resuming, on any number of ranks
slow_runs    small runs, each slow for one planted reason: the cases of lesson 11
torchft_replica   replicas that continue when one is killed, by a library: lesson 13
"""
