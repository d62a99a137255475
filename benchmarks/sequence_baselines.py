"""The calls of other libraries that sequences_cuda.py times, of tensors of PyTorch with bfloat16 numbers.

The environment variable BASELINES names a folder with libraries that were built for this PyTorch: fa3.so and
flashmla.so, which are _vllm_fa3_C.abi3.so and _flashmla_C.abi3.so of the package vllm. cuDNN is called through the
package nvidia-cudnn-frontend, and FlashAttention-2 is PyTorch's own. What is absent raises an error that says so.

Batches are (batch, tokens, heads, head_dim), packed sequences (tokens, heads, head_dim), pages (pages, page, heads,
head_dim). Lengths, offsets and page tables are int32 on the device.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from flashkit.tools.bench.contender import torch_entry

Call = Callable[[], tuple[Any, ...]]
"""What is timed; it returns (out,) or (dq, dk, dv)."""

FA3_TENSORS = (
    "k_new", "v_new", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
    "seqlens_rotary", "q_descale", "k_descale", "v_descale", "scheduler_metadata", "s_aux", "cp_tot_seqused_k",
)  # fmt: skip
"""The tensors that calls of FlashAttention-3 leave out here."""


@cache
def library(file: str, namespace: str) -> Any:
    """The operators of a library in the folder of BASELINES; LookupError if it is not there."""
    import torch

    folder = os.environ.get("BASELINES")
    if not folder or not (path := Path(folder) / file).exists():
        raise LookupError(f"no {file} in BASELINES, which is {folder or 'not set'}")
    torch.ops.load_library(str(path))
    return getattr(torch.ops, namespace)


def versions() -> dict[str, str]:
    """Of cuDNN's front end, and of the libraries as the file versions.json beside them names them."""
    found = {}
    with suppress(ImportError):
        import cudnn

        found["nvidia-cudnn-frontend"] = str(cudnn.__version__)
    with suppress(OSError):
        found |= json.loads((Path(os.environ.get("BASELINES", "")) / "versions.json").read_text())
    return found


# --- FlashAttention-3, FlashAttention-2, FlashMLA ---------------------------------------------------------------------


def fa3(
    q: Any, k: Any, v: Any, scale: float, *, causal: bool = False, offsets: Any = None, longest: int | None = None,
    lengths: Any = None, table: Any = None, q_v: Any = None, splits: int = 1,
) -> Call:  # fmt: skip
    """offsets and longest are for packed sequences, lengths for padded keys or pages. q_v: queries of the values, for
    latent keys. splits: 0 lets it choose.
    """
    forward = library("fa3.so", "_vllm_fa3_C").fwd
    given = dict.fromkeys(FA3_TENSORS) | dict(
        q=q, k=k, v=v, q_v=q_v, out=q.new_empty((*q.shape[:-1], v.shape[-1])), cu_seqlens_q=offsets,
        cu_seqlens_k=offsets, seqused_k=lengths, page_table=table, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=scale, is_causal=causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
        is_rotary_interleaved=False, num_splits=splits, pack_gqa=None, sm_margin=0, cp_world_size=1, cp_rank=0,
    )  # fmt: skip
    return lambda: (forward(**given)[0],)


def fa2(q: Any, k: Any, v: Any, dout: Any, direction: Any, causal: bool, offsets: Any, longest: int) -> Call:
    from torch.nn.attention.varlen import varlen_attn

    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    grouped = {name: x for name, x in grouped.items() if name in inspect.signature(varlen_attn).parameters}
    window = (-1, 0 if causal else -1)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=window, **grouped)

    return differentiable(attend, (q, k, v), dout, direction)


def flash_mla(q: Any, pages: Any, lengths: Any, table: Any, scale: float, causal: bool) -> Call:
    """q (batch, queries, heads, 576) on pages of 64, whose first 512 columns are the values."""
    decode = library("flashmla.so", "_flashmla_C").dense_decode_fwd
    schedule = [None, None]  # made by the first call, as once for all layers of a step

    def call() -> tuple[Any]:
        out, _, schedule[0], schedule[1] = decode(q, pages, 512, lengths, table, scale, causal, *schedule, None)
        return (out.reshape(*q.shape[:-1], 512),)

    return call


def sdpa_cudnn(q: Any, k: Any, v: Any, dout: Any, direction: Any, causal: bool) -> Call:
    """cuDNN through PyTorch, on batches."""
    import torch
    from torch.nn import attention as choices

    def attend(q: Any, k: Any, v: Any) -> Any:
        with choices.sdpa_kernel(choices.SDPBackend.CUDNN_ATTENTION):
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    return differentiable(attend, (q, k, v), dout, direction)


def differentiable(attend: Callable[..., Any], tensors: tuple[Any, ...], dout: Any, direction: Any) -> Call:
    """The forward pass of a function of PyTorch, or its backward pass alone."""
    entry = torch_entry(attend, tensors, dout, lambda x: x, direction)
    if direction == "backward":
        return entry.call  # type: ignore[return-value]
    return lambda: (entry.call(),)


# --- cuDNN ------------------------------------------------------------------------------------------------------------


class CudnnGraph:
    """A graph of cuDNN's front end. `graph` takes operations, `reads` and `writes` name tensors of PyTorch."""

    def __init__(self) -> None:
        import cudnn
        import torch

        kinds = cudnn.data_type
        self._kinds = {
            torch.bfloat16: kinds.BFLOAT16, torch.float32: kinds.FLOAT, torch.int32: kinds.INT32,
            torch.int64: kinds.INT64,
        }  # fmt: skip
        self._memory: dict[int, Any] = {}
        self._workspace: Any = None
        self._offsets: dict[int, Any] = {}
        self.graph = cudnn.pygraph(
            io_data_type=kinds.BFLOAT16, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT,
            handle=cudnn_handle(),
        )  # fmt: skip

    def reads(self, x: Any, shape: Any = None, strides: Any = None) -> Any:
        number = self._add(x)
        axes = {"dim": list(shape or x.shape), "stride": list(strides or x.stride())}
        return self.graph.tensor(uid=number, data_type=self._kinds[x.dtype], **axes)

    def writes(self, node: Any, x: Any, shape: Any = None, strides: Any = None) -> Any:
        node.set_uid(self._add(x)).set_output(True).set_data_type(self._kinds[x.dtype])
        return node.set_dim(list(shape or x.shape)).set_stride(list(strides or x.stride()))

    def ragged(self, offsets: Any, width: int) -> Any:
        """The offsets of packed sequences in elements, of tokens of this width."""
        if width not in self._offsets:
            self._offsets[width] = self.reads((offsets.long() * width).view(-1, 1, 1, 1))
        return self._offsets[width]

    def built(self) -> CudnnGraph:
        import cudnn
        import torch

        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        size = max(self.graph.get_workspace_size(), 1)
        self._workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        return self

    def run(self) -> None:
        import cudnn
        import torch

        cudnn.set_stream(handle=cudnn_handle(), stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute(self._memory, self._workspace, handle=cudnn_handle())

    def _add(self, x: Any) -> int:
        self._memory[len(self._memory) + 1] = x
        return len(self._memory)


@cache
def cudnn_handle() -> Any:
    import cudnn

    return cudnn.create_handle()


def cudnn_packed(q: Any, k: Any, v: Any, dout: Any, direction: Any, causal: bool, offsets: Any, longest: int) -> Call:
    """Packed sequences: padded tensors by their shape and strides, with the place of each sequence."""
    batch = len(offsets) - 1
    lengths = (offsets[1:] - offsets[:-1]).view(batch, 1, 1, 1)
    out, stats = q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((*q.shape[:-1], 1)).float()
    options = {"attn_scale": q.shape[-1] ** -0.5, "use_causal_mask": causal, "use_padding_mask": True}

    def place(made: CudnnGraph, x: Any, access: Callable[..., Any]) -> Any:
        heads, dim = x.shape[1:]
        width = heads * dim
        ragged = made.ragged(offsets, width)
        return access(x, (batch, heads, longest, dim), (longest * width, dim, width, 1)).set_ragged_offset(ragged)

    def inputs(made: CudnnGraph, **tensors: Any) -> dict[str, Any]:
        nodes = {name: place(made, x, made.reads) for name, x in tensors.items()}
        return nodes | options | {"seq_len_q": made.reads(lengths), "seq_len_kv": made.reads(lengths)}

    forward = CudnnGraph()
    of_out, of_stats = forward.graph.sdpa(**inputs(forward, q=q, k=k, v=v), generate_stats=direction == "backward")
    place(forward, out, partial(forward.writes, of_out))
    if direction == "forward":
        forward.built()
        return lambda: (forward.run(), (out,))[1]
    place(forward, stats, partial(forward.writes, of_stats))
    forward.built().run()
    backward, gradients = CudnnGraph(), [q.new_empty(x.shape) for x in (q, k, v)]
    nodes = backward.graph.sdpa_backward(
        **inputs(backward, q=q, k=k, v=v, o=out, dO=dout, stats=stats),
        max_total_seq_len_q=len(q), max_total_seq_len_kv=len(k),
    )  # fmt: skip
    for node, x in zip(nodes, gradients, strict=True):
        place(backward, x, partial(backward.writes, node))
    backward.built()
    return lambda: (backward.run(), tuple(gradients))[1]


def cudnn_lengths(q: Any, k: Any, v: Any, scale: float, causal: bool, lengths: Any, table: Any = None) -> Call:
    """A batch of queries at the ends of padded keys, or of keys in pages."""
    made, batch = CudnnGraph(), len(q)
    of_q, of_k, of_v = (made.reads(x.transpose(1, 2)) for x in (q, k, v))
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    queries = lengths.new_full((batch, 1, 1, 1), q.shape[1])
    options: dict[str, Any] = {"use_causal_mask_bottom_right": True} if causal else {}
    if table is not None:
        columns = table.shape[1]
        pages = table.view(batch, 1, columns, 1)
        options["paged_attention_max_seq_len_kv"] = columns * k.shape[1]
        options |= {f"paged_attention_{name}_table": made.reads(pages) for name in ("k", "v")}
    node, _ = made.graph.sdpa(
        q=of_q, k=of_k, v=of_v, generate_stats=False, attn_scale=scale, use_padding_mask=True,
        seq_len_q=made.reads(queries), seq_len_kv=made.reads(lengths.view(batch, 1, 1, 1)), **options,
    )  # fmt: skip
    made.writes(node, out.transpose(1, 2))
    made.built()
    return lambda: (made.run(), (out,))[1]
