"""Which part of a model each rank holds, and which part of each stored tensor it reads. Nothing here needs torch.

    model   = parse_model_config(...)            the whole; every rank has it, and checks are made with it
    its     = shard_of(model, place)             what this rank computes: an ordinary `Decoder` with its own numbers
    sources = sources_of(its)                    where its weights are: `Source`s with `cuts`

`shard_of` (shard.py) raises a ConfigError with limit and value if a model cannot be split that way; `check_shards`
calls it for every place before a process starts. In the description of a rank

    num_heads, num_kv_heads, size of MLPs and of each expert    are the rank's (tensor parallelism)
    layers                                                      are those of its stage, and `shares_kv_of` counts them
                                                                from the stage's first
    has_embedding, has_head                                     say whether it begins with tokens, ends with logits
    o_bias                                                      is the first tensor rank's, so that sums have it once
    vocab_size, hidden_size, numbers of latents, experts        are the whole's
    shard                                                       has the whole model, and which part this is: layers by
                                                                the checkpoint's numbers, rows of the vocabulary

so blocks, native programs and KV pools are made from it as from any other description. In addition, they sum the
results of row-parallel products over the tensor ranks (`Ranks.all_reduce`): attention's o, the MLP's down (experts and
shared ones together), and the vocabulary-parallel embedding (a row of zeros for other ranks' tokens). A layer whose
mixer and MLP are parallel has one sum. Logits of the rank's part of the vocabulary are gathered: `logit_width`
(ranges.py).

Column-parallel    qkv, q_b of latents, gate_up, experts' gate_up, kv_b, the head; sinks and norms of heads
Row-parallel       o, down, experts' down: their biases are the first rank's
By the vocabulary  embedding, head and its bias, the table of layer inputs
On every rank      other norms, routers, projections to latents, indexers, positions, layer inputs; KV heads, where
                   there are fewer than ranks; latents

A `Source` with `cuts` has, for each stored tensor, ranges of its items (experts or heads in one tensor), outputs and
inputs; `order` refers to what is read. cuts.py makes them from a whole `Source`, whatever its layout.

Stages (layer ranges) are an argument of `shard_of`. Spreading whole experts is `cuts.items_of`.
"""
