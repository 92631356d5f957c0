"""Serving: shards a checkpoint for its ranks, puts it into a Triton model repository and serves it.

    python -m utils.serving.export --model models/base --tp 2    # fills triton_model_repo/
    python -m utils.serving.server                               # serves it until Ctrl-C
    python -m utils.serving.bench                                # compares it with its peers

engine/        shipped in every exported version: continuous batching over ranks with a KV cache
export         a checkpoint -> a version of the repository, and back (checkpoint: reads the source;
               shard: a file per rank; repository: one rename; vllm: for Triton's vLLM backend)
model_config   reads and changes config.pbtxt
server/        a tritonserver from start to end, and the command (install: where it is)
gateway/       in front of the server: limits, keys, OpenAI's API, and a watch on its processes
client         requests for text and tokens, whole or streamed
metrics        the server's metrics and statistics as frames
load           many clients at once, and the goodput under a latency promise
bench          compares the engine, Triton and transformers

Import from the files: every rank imports this room first, so this file imports nothing.
"""
