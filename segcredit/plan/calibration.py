"""Numbers that come from measurements rather than from shapes; docs/plan.md says which."""

ANNOTATE_SHARE = 0.345
"""Of the GPU's peak that forward passes reach."""
UPDATE_SHARE = 0.385
"""The same for forward and backward passes, recomputed ones included."""
WIDTH = 2048
"""Hidden size of the model with which both were measured."""
MATRIX_SHARE = 0.7
"""The share that matrix products alone reach (assumed); it says how much wider layers gain."""
COMPILED_ANNOTATE = 1.28
COMPILED_UPDATE = 1.35
"""How much faster model.compile makes them."""
LAUNCH = 0.95e-3
"""Seconds in which the host starts one layer's kernels for one forward pass."""
ADAPTER_PASSES = 8
"""Times that LoRA reads or writes what a layer says, in a forward or a backward pass; measured on
the linear layers of a 7B model alone."""
CACHE_SHARE = 0.26
"""Of the memory's bandwidth at which sampling reads its cache."""
VLLM_TOKEN = 1.2e-5
"""Seconds of the host for each token that vLLM writes."""

FIXED = 0.07 * 2**30
"""Bytes held besides models: libraries' workspaces, masks, buffers."""
PER_TOKEN = 64
"""Bytes per place of the batch, (responses, max_tokens): tokens, log-probabilities, credit."""
CONTEXT = 0.6 * 2**30
"""Bytes that CUDA takes outside torch's count (assumed)."""
COMMUNICATION = 0.5 * 2**30
"""Bytes that NCCL takes where GPUs are several (assumed)."""
FRAGMENTED = 0.03
"""Share of the peak that torch holds without being able to use it (assumed)."""
PROCESS = 3.0 * 2**30
"""Bytes of main memory of a process with torch and transformers loaded (assumed)."""
LINK_SHARE = 0.7
"""Of a link's nominal speed that copies and sums over GPUs reach (assumed)."""
STREAM_SHARE = 0.8
"""Of the memory's bandwidth that element-wise passes reach (assumed)."""
