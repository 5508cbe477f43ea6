"""Options: the worker."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.groups.base import Options, Shown

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
CpuKernels = Literal["auto", "native", "torch"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]


class WorkerOptions(Options, frozen=True):
    """The process that holds weights and KV pool."""

    device: Annotated[
        str, Meta(description="'auto', 'cpu', 'cuda' or 'cuda:N'."), Shown("DEVICE", "auto, cpu, cuda or cuda:N")
    ] = "auto"
    dtype: Annotated[
        DTypeName,
        Meta(
            description="Type of weights and activations, and of KV unless --kv-cache-dtype says otherwise. 'auto' "
            "takes the checkpoint's type where the device is fast in it, and bfloat16 for quantized weights on a CPU."
        ),
        Shown("TYPE", "auto, float32, bfloat16 or float16"),
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDType,
        Meta(
            description="Type of keys and values in the KV pool and in all tiers. 'auto' is --dtype, or what the "
            "checkpoint says if it has scales for them; 'fp8' is 'fp8_e4m3'. Fewer bytes hold more tokens and are read "
            "faster, and change the text a little."
        ),
        Shown("TYPE", "of keys and values: auto, fp8, int8, int4, ..."),
    ] = "auto"
    quantization: Annotated[
        str,
        Meta(
            description="Quantize the matrices of a checkpoint of floats as they are read: 'int8' (inputs of products "
            "too, token by token), 'int8_weight_only', 'int4' (in groups of 32; the head in 8 bits), or 'fp8' (e4m3; "
            "inputs too). Empty: weights are as they are stored. The checkpoint's own method is accepted, too."
        ),
        Shown("FORMAT", "quantize floats at load: int8, int8_weight_only, int4 or fp8", ("-q",)),
    ] = ""
    load_format: Annotated[
        Literal["safetensors", "dummy"], Meta(description="'dummy' makes random weights of the right shapes.")
    ] = "safetensors"
    gpu_memory_utilization: Annotated[
        float,
        Meta(description="Share of the GPU's memory for weights, activations and KV pool.", gt=0.0, le=1.0),
        Shown("SHARE", "share of the GPU's memory to use"),
    ] = 0.9
    cpu_kv_cache_gib: Annotated[
        float,
        Meta(
            description="Size of the KV pool on a CPU, in GiB. 0: a tenth of the free memory, but at most 4 GiB.",
            ge=0.0,
        ),
        Shown(line="KV pool on a CPU (default: a tenth of the free memory)"),
    ] = 0.0
    num_pages: Annotated[
        int,
        Meta(description="Size of the KV pool in pages. 0: as many as the memory allows.", ge=0),
        Shown(also=("--num-gpu-blocks-override",)),
    ] = 0
    state_snapshots_gib: Annotated[
        float,
        Meta(
            description="Memory beside the KV pool, in GiB, for copies of rows' states, if layers keep any: a request "
            "can start after a cached prefix only where there is such a copy. 0: each computes its whole prompt.",
            ge=0.0,
        ),
    ] = 1.0
    num_threads: Annotated[
        int,
        Meta(
            description="Most threads for the CPU kernels. 0: one per core that this process may use.",
            ge=0,
        ),
        Shown(line="CPU threads (default: one per core)", also=("-t", "--threads")),
    ] = 0
    spare_worker: Annotated[
        bool,
        Meta(
            description="Keep a spare process ready that has imported everything but holds no weights (about 200 "
            "MB). A lost worker is replaced by a fork of it, without delay."
        ),
    ] = True
    cpu_kernels: Annotated[
        CpuKernels,
        Meta(
            description="Kernels on a CPU: 'native' are in C++, and are compiled first if necessary (this takes "
            "seconds and a C++ compiler); 'torch' are PyTorch's own. 'auto' takes the native ones where "
            "they can be had."
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool, Meta(description="Do not capture CUDA graphs."), Shown(line="do not capture CUDA graphs")
    ] = False
    profile: Annotated[
        str,
        Meta(
            description="Folder for traces by torch's profiler: each worker records 60 steps after its first 20, and "
            "more when POST /start_profile asks for them. Empty: no traces."
        ),
        Shown("PATH"),
    ] = ""
