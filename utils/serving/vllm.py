"""Export a checkpoint for Triton's vLLM backend: the way to production on GPUs.

    export_vllm("models/base", "triton_model_repo", tp=2)      # …/gpt_vllm/1
    python -m utils.serving.export --model models/base --tp 2 --backend vllm

    gpt_vllm/config.pbtxt          backend "vllm"; vLLM chooses the devices, so KIND_MODEL
    gpt_vllm/1/model.json          arguments of vLLM's engine: the model's folder, number of GPUs
    gpt_vllm/1/model/              the checkpoint as it is: vLLM shards it itself

It exports any model that vLLM takes, from a Hugging Face folder with its tokenizer and weights in
safetensors: the `architectures` of config.json select vLLM's code for it. Python files in the
folder are not copied.

Source: github.com/triton-inference-server/vllm_backend, src/model.py, README.md and samples/ (as of
January 2026). The backend passes 1/model.json to AsyncEngineArgs, so each key must be an argument
of the vLLM in the image: these four are fields of that class in vLLM 0.33.0
(`disable_log_requests`, which older examples give, is gone: vllm-project/vllm pull request 21739).
It refuses a model that is not decoupled, and declares this by itself only if the server may
complete configurations. The container command of utils/serving/install.py forbids that, so
config.pbtxt is complete.

This was NOT run: the server in this workshop's wheel has no vLLM backend, and vLLM needs a GPU. The
tests check that the files parse, that the server's own rules for names and types hold, and that
`transformers` opens the model's folder.
"""

import shutil
from pathlib import Path, PurePosixPath

from utils.models import hf_format
from utils.models.tokenizer import BYTES
from utils.serving import repository
from utils.serving.checkpoint import stored_dtypes, write_byte_tokenizer
from utils.serving.install import container_command
from utils.serving.repository import ExportError
from utils.serving.shard import NAMES

MODEL = repository.VLLM
ARGUMENTS = "model.json"
SMALL = ("*.json", "*.txt", "*.model", "*.jinja")  # copied along with the weights
TOKENIZERS = (hf_format.TOKENIZER, "*.model", "vocab.*", "tekken.json")
MOUNT = "/models"  # where the container's command puts the repository
CONFIG = """\
# The same model behind Triton's vLLM backend (python -m utils.serving.export --backend vllm).

backend: "vllm"

# vLLM batches by itself (continuous batching), so Triton must not.
max_batch_size: 0

# Any number of responses to a request: a stream. The backend accepts nothing else.
model_transaction_policy { decoupled: true }

# vLLM starts its tensor-parallel ranks and chooses their devices: one instance, whatever GPUs there
# are. KIND_GPU would make an instance of the whole model on each GPU.
instance_group [ { kind: KIND_MODEL count: 1 } ]

input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  # a JSON object: {"max_tokens": 64, "temperature": 0.0}
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true },
  { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "return_finish_reason" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] }
]
"""


def export_vllm(
    model: str | Path, out: str | Path, tp: int, version: int | None = None, mount: str = MOUNT
) -> Path:
    """Write a checkpoint for the vLLM backend into the repository `out`; return the version's
    folder.

    tp      tensor-parallel GPUs; must divide the model's heads
    mount   where the server finds `out`: vLLM needs the model's folder as an absolute path
    Raises ValueError as `export` does.
    """
    source = hf_format.recover(model)
    hf, headers = hf_format.read_config(source), hf_format.read_headers(source)
    if not hf.get("architectures"):
        raise ExportError(
            f"{source / hf_format.CONFIG} names no architectures, by which vLLM selects its code: "
            "transformers' save_pretrained writes them"
        )
    heads = hf.get("num_attention_heads", hf.get("n_head"))
    if type(tp) is not int or tp < 1 or (type(heads) is int and heads % tp):
        raise ExportError(f"tp {tp!r} does not divide the model's {heads} heads")
    on_bytes = not any(any(source.glob(name)) for name in TOKENIZERS)
    if on_bytes and hf.get("vocab_size") != BYTES:
        raise ExportError(f"{source} has no {hf_format.TOKENIZER}: copy the model's into it")
    if not PurePosixPath(mount).is_absolute():
        raise ExportError(f"--mount {mount} is not an absolute path, but vLLM needs one")
    with repository.building(out, MODEL, ARGUMENTS) as building:
        number = building.free_version(version)
        files = {file for file, _ in headers.values()}
        files |= {file for name in SMALL for file in source.glob(name) if file.is_file()}
        size = sum(file.stat().st_size for file in files)
        folder = building.open_version(number, size)
        (folder / "model").mkdir()
        for file in files:
            shutil.copyfile(file, folder / "model" / file.name)
        if on_bytes:
            write_byte_tokenizer(folder / "model")
        dtypes = [NAMES.get(dtype, "auto") for dtype in stored_dtypes(headers)]
        (building.beside / MODEL / "config.pbtxt").write_text(CONFIG)
        arguments = {
            "model": str(PurePosixPath(mount) / MODEL / str(number) / "model"),
            "tensor_parallel_size": tp,
            "dtype": dtypes[0] if len(dtypes) == 1 else "auto",  # auto turns float32 into float16
            "gpu_memory_utilization": 0.5,  # of each GPU, as the backend's README has it
        }
        hf_format.write_json(folder / ARGUMENTS, arguments)
        return building.publish()


def command(out: str | Path) -> str:
    """The command that serves the repository in NVIDIA's image."""
    return container_command(out)
