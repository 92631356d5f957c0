"""Given: the brief of the final project, as numbers. The notebook says the same in words."""

from labs.support.five_dimensions.cases import Case
from utils.planner import MACHINES, MODELS, failures

# a: the run that you plan
CASE = Case(MODELS["llama2-70b"], MACHINES["aws-p4d"], 1024, 1024)
TOKENS = 1e12
STORAGE = 25e9  # bytes per second, for all ranks together
STATE = 12  # bytes per parameter of a checkpoint: fp32 weights and AdamW's two moments
RESTART = 30 * 60.0  # seconds
BETWEEN = failures.OPT.between(CASE.gpus)  # seconds between two failures of these GPUs
DAY = 24 * 3600.0

# b: its rehearsal on this machine (the model and the batch of lab 10, exercise f)
RANKS, CAP = 2, 18_000_000  # bytes of a rank
STEPS = 24
SAVING, RESTARTING, FAILING = 0.5, 4.0, 30.0  # steps: a save, a restart, between two failures

# c and d: the service, with models/small
DEVICE = 3 * 2**20  # bytes of a rank, for its weights as stored and its slots of the KV cache
COST = 0.005  # bits per byte, at most
LONGEST = 96, 32  # tokens: of the longest prompt, and of the answer to it
USERS, PER_STEP = 24, 5.0  # requests at the same moment, and tokens per step for all of them
CROWD, REFUSED = 48, 16  # of CROWD at the same moment, at least REFUSED are refused
PATIENCE = 1.0, 0.1  # seconds until the first token, and for each later one (measured, not judged)
