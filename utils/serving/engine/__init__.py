"""The engine: requests of many clients share one tensor-parallel model.

The export copies this folder into every version, with the files of `utils` that it imports; beside
those it needs torch, numpy, safetensors and tokenizers only; on a GPU the Triton language, too,
which comes with torch.

engine          the leader: takes requests, plans steps, hands out tokens, starts ranks again
request         SamplingParams, Stream, and what can go wrong
scheduler       where a request joins the batch, and leaves it;  blocks: of the paged KV cache
ranks, worker   the leader's side of the ranks, and the process of one
model           a rank's part of the decoder with its KV cache;  sampling: logits -> tokens
linear          its matrix product;  native, step.cpp: compiled for the CPU;  fused: for a GPU
text_stream     tokens -> text, as soon as it is certain
stats           what is counted, and how long requests take
version         a version's folder, read and verified
socket_server   requests of another process of this machine
trace           which request was where, for whoever follows it through all processes
"""
