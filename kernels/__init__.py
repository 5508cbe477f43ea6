"""One operation per file: public wrapper, CPU path, plain reference; Triton kernels at the same place in `triton/`.

Nothing here depends on a model or on another package of the project. A wrapper checks shapes. Then it picks
the Triton kernel for CUDA tensors and the torch path for CPU tensors; `*_reference` is the oracle for both.

Words: T tokens of a ragged batch, N rows of the batch, S rows that sample, R rows of the persistent row
state, Hq/Hk query and key-value heads, D head size, V vocabulary. A KV pool's layer has `k_pages` and
`v_pages` of shape [num_pages, Hk, page_size, D]; slot = page_id * page_size + offset, -1 is padding.
"""
