"""How a version is served: the options of an engine, from Python or from config.pbtxt.

EngineConfig(max_num_seqs=8, max_model_len=2048)
EngineConfig.of_parameters({"max_num_seqs": "8"}, "gpt_engine/config.pbtxt")
config.rank_bytes(model, 2, "bfloat16", on_cpu=False)  # weights, keys and values
"""

import difflib
import math
from dataclasses import dataclass, fields

from utils.models.config import GPTConfig
from utils.serving.engine.blocks import BLOCK, blocks_for
from utils.serving.engine.stored import COMPUTE, FLOATS, WIDTHS, rank_tensors

DEVICES = ("auto", "cpu", "cuda")
WHOLE = ("max_num_seqs", "max_model_len", "num_blocks", "prefill_chunk", "queue", "threads")
MOST = {"max_num_seqs": 2**16, "queue": 2**20, "threads": 2**12}  # the leader keeps lists of them
SWITCHES = ("enable_prefix_caching", "enforce_eager")
SWITCH = {"true": True, "false": False}  # as texts
SECONDS = ("step_seconds", "start_seconds", "pace")


@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine, checked. Raises ValueError naming the option.

    max_num_seqs    requests that run together
    max_model_len   most positions per request, including virtual and new tokens; None: as many as
                    the model has
    prefill_chunk   prompt positions that one step reads; limits how long other requests wait
    num_blocks      blocks of the KV cache, of 16 positions each; None: as many as max_num_seqs
                    requests of max_model_len need, but on a GPU no more than fit
    enable_prefix_caching   whether a prefix that is in the cache is reused
    queue           further requests that may wait; more are refused with Unavailable
    device          "cpu", "cuda" (one GPU per rank), or "auto": CUDA if every rank has a GPU
    dtype           compute dtype of floating-point weights; "auto": the version's, else as stored,
                    on the CPU float32
    kv_cache_dtype  of keys and values; "auto": dtype; "int8": with a scale per position and head
    enforce_eager   whether decode steps run PyTorch's operators one by one: on the CPU without
                    step.cpp, which is compiled at the first start on a machine (native.py), on a
                    GPU without our own kernels and CUDA graphs (fused.py)
    threads         CPU threads per rank; None: all cores but one, divided among the ranks (the last
                    is for the leader and the clients: a thread that waits for a core stalls its
                    rank)
    step_seconds    after which a rank that does not answer counts as dead
    start_seconds   after which ranks that are not ready count as dead
    pace            minimum seconds between two chunks of a stream; each chunk costs wake-ups
    """

    max_num_seqs: int = 16
    max_model_len: int | None = None
    prefill_chunk: int = 256
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    queue: int = 64
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False
    threads: int | None = None
    step_seconds: float = 20.0
    start_seconds: float = 120.0
    pace: float = 0.02

    def __post_init__(self):
        for name in WHOLE:
            value, least = getattr(self, name), 0 if name == "queue" else 1
            if value is None and name in ("max_model_len", "num_blocks", "threads"):
                continue
            if type(value) is not int or value < least:
                raise ValueError(f"{name} {value!r} is not an integer of at least {least}")
            if value > (most := MOST.get(name, 2**31 - 1)):
                raise ValueError(f"{name} {value} is too large: give {most} or less")
        for name in SECONDS:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} {value!r} is not a time limit: give seconds above 0")
        for name in SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} {value!r} is not true or false")
        floats = ("auto", *FLOATS)
        words = {"device": DEVICES, "dtype": floats, "kv_cache_dtype": (*floats, "int8")}
        for name, known in words.items():
            if (given := getattr(self, name)) not in known:
                fix = f"give one of {', '.join(known)}"
                if name == "dtype" and given in COMPUTE:  # quantized at export
                    fix = f'give "auto", and export a version with --dtype {given}'
                raise ValueError(f"{name} {given!r} is not known: {fix}")

    @classmethod
    def of_parameters(cls, parameters: dict[str, str], place: str) -> "EngineConfig":
        """The options from the strings of a config.pbtxt; 0 and "" mean None.

        place: their file, for messages. Raises ValueError naming the file and the option.
        """
        known, given = {field.name: field.default for field in fields(cls)}, {}
        for name, text in parameters.items():
            if name not in known:
                near = "".join(difflib.get_close_matches(name, known, 1))
                fix = f"did you mean {near}?" if near else f"expected one of {', '.join(known)}"
                raise ValueError(f"{place}: parameter {name!r} is not known: {fix}")
            kind = float if name in SECONDS else int if name in WHOLE else str
            try:
                value = kind(text)
            except ValueError:
                value = text  # the check refuses it by name
            if isinstance(known[name], bool):
                value = SWITCH.get(text.lower(), text)
            given[name] = None if known[name] is None and value in (0, "") else value
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None

    def length(self, model: GPTConfig) -> int:
        """Most positions per request."""
        return min(self.max_model_len or model.max_positions, model.max_positions)

    def blocks(self, model: GPTConfig) -> int:
        """Blocks of the cache. Raises ValueError if they cannot hold one request."""
        longest = blocks_for(self.length(model))
        wanted = self.max_num_seqs * longest if self.num_blocks is None else self.num_blocks
        if wanted < longest:
            raise ValueError(
                f"num_blocks {wanted} are fewer than the {longest} that one request of "
                f"{self.length(model)} positions needs: give more, or lower max_model_len"
            )
        return wanted

    def dtypes(self, stored: str, on_cpu: bool, compute: str = "auto") -> tuple[str, str]:
        """The dtypes, by name, of floating-point weights and of the cache, for a model stored as
        `stored` in a version that computes in `compute` (stored.py)."""
        dtype = compute if self.dtype == "auto" and compute in FLOATS else self.dtype
        if dtype == "auto":
            dtype = "float32" if on_cpu else stored
        return dtype, dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def rank_bytes(
        self, model: GPTConfig, tp: int, stored: str, on_cpu: bool, compute: str = "auto"
    ) -> tuple[int, int]:
        """(bytes of weights, bytes of keys and values) of the rank with the most weights, of `tp`
        ranks of a model stored as `stored` and computed in `compute`. The cache is allocated at the
        start."""
        dtype, cache_dtype = self.dtypes(stored, on_cpu, compute)
        weights = max(
            sum(
                math.prod(shape) * WIDTHS[kind]
                for kind, shape in rank_tensors(model, rank, tp, dtype, compute).values()
            )
            for rank in range(tp)
        )
        vectors = 2 * model.layers * (model.key_value_heads // tp) * BLOCK * self.blocks(model)
        bytes_of_one = model.head_size * WIDTHS[cache_dtype] + 4 * (cache_dtype == "int8")
        return weights, vectors * bytes_of_one
