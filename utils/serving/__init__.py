"""Serving: a checkpoint cut for its ranks, put into a Triton model repository, served, and asked.

    python -m utils.serving.export --model models/base --tp 2    # fills triton_model_repo/
    python -m utils.serving.server                               # serves it until Ctrl-C
    python -m utils.serving.bench                                # compares it with its peers

engine/        what every exported version ships: continuous batching over ranks with a KV cache
export         a checkpoint -> a version of the repository, and back (checkpoint: what is served;
               shard: who gets what; repository: one rename; vllm: for Triton's vLLM backend)
model_config   config.pbtxt, read and changed
server/        a tritonserver from start to end, and the command (install: where it is)
gateway/       what stands in front of it: limits, keys, OpenAI's API, processes that are watched
client         who asks it: text and tokens, whole or as they come
metrics        what it says of itself
load           many clients at once, and the goodput of their promise
bench/         the engine, Triton and transformers in turns

Import from the files: a rank starts with this room, so it brings nothing along.
"""
