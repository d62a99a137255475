"""Faults in latent attention: values in the keys, keys in two arrays, `mla`."""

from __future__ import annotations

from . import Fault

TESTS = ("tests/conformance/test_latent.py",)

CPU, LATENT = "flashkit/backends/cpu", "flashkit/latent.py"
DECODE, LOADER = f"{CPU}/kernels/decode.py", f"{CPU}/kernels/kv_loader.py"

TEST = "tests/conformance/test_latent.py -k"
MLA_DECODES, MLA_TILES = (f"{TEST} 'test_mla and float32 and {size} and apart'" for size in ("decoding", "tiles"))
MLA_TAKES, PIECES = f"{TEST} takes", f"{TEST} pieces"
OTHERS = f"{TEST} 'bad or row_together or k_pe or refuse'"

FAULTS = (
    Fault("a latent cache holds values too", "flashkit/cache/kv_cache.py", "            widths.pop()\n",
          "            pass\n", f"{TEST} latent_cache"),
    Fault("a latent cache takes values", "flashkit/cache/layer.py", "        if v is not None:\n            raise",
          "        if False:\n            raise", "tests/unit/test_kv_cache.py -k 'bad_input and latent'"),
    Fault("a latent cache rotates the first columns", "flashkit/cache/layer.py", "        if rotary is not None:\n"
          "            raise", "        if False:\n            raise",
          "tests/unit/test_kv_cache.py -k 'bad_input and latent'"),
    Fault(
        "the columns of K_PE follow those of K in a query",
        DECODE,
        "load_query(q[i, width:], row[end:])",
        "load_query(q[i, width:], row[width:])",
        MLA_DECODES,
    ),
    Fault("scores of K_PE replace those of K", DECODE, "s[i, j] += s_pe[i, j]", "s[i, j] = s_pe[i, j]", MLA_DECODES),
    Fault(
        "scores of K are all",
        DECODE,
        "    if args[DIM_PE] != 0:\n        scores_of",
        "    if False:\n        scores_of",
        MLA_DECODES,
    ),
    Fault("values are never views", DECODE, "views = args[V] == args[K] and", "views = args[V] == 0 and", PIECES),
    Fault("values are always views", DECODE, "views = args[V] == args[K] and", "views = args[V] != 0 and", PIECES),
    Fault(
        "too many tiles in cache",
        f"{CPU}/launch.py",
        "max(BYTES_IN_CACHE // tile_bytes, 1)",
        "max(2 * BYTES_IN_CACHE // tile_bytes, 1)",
        PIECES,
    ),
    Fault(
        "K is gathered twice",
        LOADER,
        "gather(args, K_PE, seq, b, head_kv, first, tile[:, d - d_pe :])",
        "gather(args, K, seq, b, head_kv, first, tile[:, d - d_pe :])",
        MLA_TILES,
    ),
    Fault("K_PE is not gathered", LOADER, "if d_pe == 0 and kv_run", "if kv_run", MLA_TILES),
    Fault(
        "each page is gathered to the same rows",
        LOADER,
        "tile[done + i, j] = rows[i, j]",
        "tile[i, j] = rows[i, j]",
        MLA_TILES,
    ),
    Fault(
        "the definition has the parts in the other order",
        "flashkit/reference.py",
        'np.concatenate([of_keys["k"], keys_of(operands, operands.k_pe, b, kv_head)], axis=1)',
        'np.concatenate([keys_of(operands, operands.k_pe, b, kv_head), of_keys["k"]], axis=1)',
        MLA_TAKES,
    ),
    Fault("out may be k_pe", "flashkit/call/arguments.py", "*([] if k_pe is None else [k_pe])]", "]", OTHERS),
    Fault("any strides are one array's", LATENT, "ckv.strides == k_pe.strides and", "", OTHERS),
    Fault("a gap between the parts", LATENT, "distance == ckv.shape", "distance >= ckv.shape", OTHERS),
    Fault("scale may be None", LATENT, 'options["scale"] = number("scale", scale)', 'options["scale"] = scale', OTHERS),
    Fault("pages have heads before tokens", LATENT, ' or options.get("page_table") is not None', "", MLA_TILES),
    Fault(
        "the dtype of k_pe is not checked",
        LATENT,
        "for name, array in given.items():",
        "for name, array in [*given.items()][:3]:",
        OTHERS,
    ),
    Fault(
        "GPUs take all head dims",
        "flashkit/backends/cuda_common/backend.py",
        "MAX_HEAD_DIM = 512",
        "MAX_HEAD_DIM = 1024",
        OTHERS,
    ),
)
