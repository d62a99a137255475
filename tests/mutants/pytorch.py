"""Faults in arrays of other libraries, and in flashkit.torch and flashkit.transformers."""

from __future__ import annotations

from . import Fault

NAMES = "foreign_arrays", "torch", "transformers"
ARRAYS, TORCH, TRANSFORMERS = (f"tests/libraries/test_{name}.py" for name in NAMES)
TESTS = ARRAYS, TORCH, TRANSFORMERS

FOREIGN, TRACING, OPERATORS, MASKS = (
    "flashkit/call/foreign.py", "flashkit/call/torch_tracing.py", "flashkit/torch.py", "flashkit/transformers.py",
)  # fmt: skip

FAULTS = (
    Fault("gradients are cut", FOREIGN, "if array.requires_grad and torch.is_grad_enabled():", "if False:", ARRAYS),
    Fault("tangents are cut", FOREIGN, " or _is_dual(torch, array):", ":", ARRAYS),
    Fault("bfloat16 goes back as int16", FOREIGN, "torch.from_numpy(native.view(np.int16)).view(torch.bfloat16)",
          "torch.from_numpy(native.view(np.int16))", ARRAYS),
    Fault("subclasses of tensors", FOREIGN,
          "type(array).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__", "False", ARRAYS),
    Fault("out is immutable", FOREIGN, 'if name == "out":', "if False:", ARRAYS),
    Fault("lengths of another library", FOREIGN, "name not in HOST_INTEGERS and getattr(", "False and getattr(",
          ARRAYS),
    Fault("out comes back as a new array", FOREIGN, "if out is None else out\n", "\n", ARRAYS),
    Fault("cu_seqlens of q alone", FOREIGN, 'if isinstance(value, tuple) and name == "cu_seqlens":', "if False:",
          ARRAYS),
    Fault("vjps return NumPy's arrays", "flashkit/api.py", "lent._loans = (loan, *lent._loans)", "pass", ARRAYS),

    Fault("views are read as (B, H, N, D)", OPERATORS, 'options["layout"] = "bnhd"\n', "pass\n", TORCH),
    Fault("the fake result is contiguous", OPERATORS,
          "out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1])).transpose(1, 2)",
          "out = q.new_empty((*q.shape[:-1], v.shape[-1]))", TORCH),
    Fault("no dlse", OPERATORS, "None if dlse is None else _borrow(dlse.contiguous()).reshape(operands.lse.shape)",
          "None", TORCH),
    Fault("dbias without dlse", OPERATORS, "delta = delta - dlse.reshape(delta.shape)", "pass", TORCH),
    Fault("dbias without causal", OPERATORS, "visible = visible & (keys <= at)\n", "pass\n", TORCH),
    Fault("dbias without a window", OPERATORS, 'visible = visible & (keys >= at - given["window_left"])', "pass",
          TORCH),
    Fault("dbias without lengths", OPERATORS, "visible = (keys < lengths.to(q.device)[b]).expand(n_q, n_k)",
          "visible = (keys < n_k).expand(n_q, n_k)", TORCH),
    Fault("dbias without the mask", OPERATORS, 'visible = visible & entry("mask", b)', "pass", TORCH),
    Fault("dbias without softcap", OPERATORS, 's = given["softcap"] * torch.tanh(s / given["softcap"])', "pass", TORCH),
    Fault("dbias without slopes", OPERATORS, "s = s - slopes[:, None, None] * (at - keys).abs()", "pass", TORCH),
    Fault("dbias without dropout", OPERATORS, 'if given["dropout_p"]:\n            kept', "if False:\n            kept",
          TORCH),
    Fault("dbias of the last batch entry", OPERATORS, "        part += ds.sum_to_size",
          "        part[:] = ds.sum_to_size", TORCH),
    Fault("second derivatives are 0", OPERATORS,
          "if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True",
          "if False:", TORCH),
    Fault("modifications die before backward", OPERATORS, "ctx.options, ctx.mods = arguments[len(tensors) :], mods",
          "ctx.options, ctx.mods = arguments[len(tensors) :], None", TORCH),
    Fault("modifications are kept", OPERATORS, "weakref.finalize(self, _mods.pop, self.number, None)", "pass", TORCH),
    Fault("autocast is ignored", OPERATORS, "if torch.is_autocast_enabled(device) and q.dtype != torch.float64:",
          "if False:", TORCH),
    Fault("causal at the bottom right", OPERATORS, "q_offset=0 if is_causal else None,", "", TORCH),
    Fault("any object passes for a tensor", OPERATORS, "if not isinstance(x, torch.Tensor):", "if False:", TORCH),
    Fault("no gradient of the sinks", OPERATORS, "or (sinks is not None and sinks.requires_grad) or", "or", TORCH),
    Fault("one seed for all", OPERATORS, "torch.randint(2**62, ()) if seed is None", "torch.tensor(3) if seed is None",
          TORCH),

    Fault("an index without its axis", TRACING, "if tensor.dim() != len(symbols):", "if False:", TORCH),
    Fault("reflected operators", TRACING, "return Symbol(op(_unwrapped(other), self.graph))",
          "return Symbol(op(self.graph, _unwrapped(other)))", TORCH),
    Fault("clamp without its bound", TRACING, "x = x if min is None else expr.maximum(x, min)", "pass", TORCH),

    Fault("windows are one wider", MASKS, '"window": (local_size - 1, None)', '"window": (local_size, None)',
          TRANSFORMERS),
    Fault("the offset of the keys", MASKS, "start, end = int(q_offset) - kv_offset,", "start, end = int(q_offset),",
          TRANSFORMERS),
    Fault("traced rules without the offset of the keys", MASKS, "function(b, h, q + kv_offset, k + kv_offset)",
          "function(b, h, q, k)", TRANSFORMERS),
    Fault("padding is ignored", MASKS, 'rule["mask"] = padding[:, None, None, :]', "pass", TRANSFORMERS),
    Fault("padding of the first keys", MASKS, "padding[:, kv_offset : kv_offset + kv_length]",
          "padding[:, :kv_length]", TRANSFORMERS),
    Fault("keys not written yet are read", MASKS, "seen = options[\"q_offset\"] + 1", "seen = n_k", TRANSFORMERS),
    Fault("no sinks", MASKS, "sinks=s_aux, ", "", TRANSFORMERS),
    Fault("no softcap", MASKS, "softcap=softcap, ", "", TRANSFORMERS),
    Fault("no position bias", MASKS, "if position_bias is not None:\n        options", "if False:\n        options",
          TRANSFORMERS),
    Fault("causal for all that have no mask", MASKS,
          '(getattr(module, "is_causal", True) if is_causal is None else is_causal)', "True", TRANSFORMERS),
    Fault("the default scale", MASKS, "scale=scaling, ", "", TRANSFORMERS),
)  # fmt: skip
