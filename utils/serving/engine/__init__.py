"""The engine: requests from many clients share one tensor-parallel model.

The export copies this folder into every version, with the files of `utils` that it imports. Besides
those it needs only torch, numpy, safetensors and tokenizers, and on a GPU the Triton language,
which comes with torch.

engine          the leader: accepts requests, plans steps, hands out tokens, restarts ranks
request         SamplingParams, Stream, and the errors of requests
scheduler       when a request joins and leaves the batch;  blocks: of the paged KV cache
ranks, worker   the leader's side of the ranks, and a rank's process
model           a rank's shard of the decoder with its KV cache;  sampling: logits -> tokens
linear          its matrix products;  native, step.cpp: compiled for the CPU;  fused: for a GPU
text_stream     tokens -> text, as soon as it is final
stats           counters, and histograms of durations
version         reads and verifies a version's folder
socket_server   requests from another process on this machine
trace           spans that follow a request through all processes
"""
