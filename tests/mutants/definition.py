"""Faults in the reference: the definition and FlashAttention in NumPy."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/unit/test_reference.py",
    "tests/conformance/test_edges.py -k 'reference'",
    "tests/conformance/test_steps.py -k 'reference'",
    "tests/unit/test_io_model.py",
)

REFERENCE = "flashkit/reference.py"

FAULTS = (
    Fault("the scale", REFERENCE, "return matmul(q, k.T) * scale", "return matmul(q, k.T)", core="scale"),
    Fault("the sink in the maximum", REFERENCE, "m = np.maximum(row_max(s), sink)", "m = row_max(s)"),
    Fault("the sink in the sum", REFERENCE, "l = row_sum(e) + np.exp(sink - finite(m))", "l = row_sum(e)", core="sink"),
    Fault(
        "l is not rescaled", REFERENCE,
        "return p, m_new, rescale * l + row_sum(p), rescale",
        "return p, m_new, l + row_sum(p), rescale",
        core="rescale",
    ),
    Fault(
        "O is not rescaled", REFERENCE,
        "return o_acc * rescale[:, None] + weighted_sum(p, v)",
        "return o_acc + weighted_sum(p, v)",
        core="rescale",
    ),
    Fault(
        "rescale of the new maximum", REFERENCE,
        "rescale = np.exp(m - finite(m_new))",
        "rescale = np.exp(m - m_new)",
    ),
    Fault(
        "a row begins without its sink", REFERENCE,
        "return np.zeros((m.size, head.spec.head_dim_v), head.dtype), m, np.exp(m - finite(m))",
        "return np.zeros((m.size, head.spec.head_dim_v), head.dtype), m, 0 * np.exp(m - finite(m))",
    ),
    Fault("FA1: O is normalized", REFERENCE, "o_acc = o_i * l_i[:, None]", "o_acc = o_i"),
    Fault(
        "FA1: EMPTY tiles are read", REFERENCE,
        "states[i, j] == EMPTY:\n                    continue\n                q, o_i",
        "states[i, j] == FULL:\n                    continue\n                q, o_i",
    ),
    Fault(
        "dlse is added", REFERENCE,
        'return delta - load_tile(head, "dlse", rows)',
        'return delta + load_tile(head, "dlse", rows)',
        core="gradient",
    ),
    Fault(
        "dlse is added to the definition", REFERENCE,
        'delta = row_sum(do * out) - (load_tile(head, "dlse")',
        'delta = row_sum(do * out) + (load_tile(head, "dlse")',
    ),
    Fault(
        "dk of one query head", REFERENCE,
        'head.memory["dk"][...] += dk',
        'head.memory["dk"][...] = dk',
        core="heads",
    ),
    Fault("dS without delta", REFERENCE, "ds = p * (dp - delta[:, None])", "ds = p * dp", core="gradient"),
    Fault(
        "dS without the derivative", REFERENCE,
        "        ds = ds * head.evaluate(expr.derivative(head.spec.score), rows, keys, s)\n",
        "        pass\n",
    ),
    Fault("dS of masked pairs", REFERENCE, "ds = select(p != 0, ds) * head.scale", "ds = ds * head.scale"),
    Fault(
        "dS without the scale", REFERENCE,
        "ds = select(p != 0, ds) * head.scale",
        "ds = select(p != 0, ds)",
        core="scale",
    ),
    Fault(
        "dV of undropped weights", REFERENCE,
        "weighted_sum(drop(head, p, rows, keys).T, do)",
        "weighted_sum(p.T, do)",
    ),
    Fault("dP is not dropped", REFERENCE, "dp = drop(head, matmul(do, v.T), rows, keys)", "dp = matmul(do, v.T)"),
    Fault(
        "dropped weights are not made up for", REFERENCE,
        "return select(keep, x / x.dtype.type(1 - operands.dropout_p))",
        "return select(keep, x)",
    ),
    Fault("the sign of dsinks", REFERENCE, "dsinks[head.h] -= row_sum(", "dsinks[head.h] += row_sum(", core="sink"),
    Fault(
        "a sink of minus infinity", REFERENCE,
        "if dsinks is not None and head.sink != -np.inf:",
        "if dsinks is not None:",
    ),
    Fault(
        "NaN of a masked key", REFERENCE,
        "total += select(w[:, j : j + 1] != 0, w[:, j : j + 1] * x[j])",
        "total += w[:, j : j + 1] * x[j]",
    ),
    Fault(
        "P recomputed from a row without keys", REFERENCE,
        "select(s != -np.inf, np.exp(s - finite(lse)[:, None]))",
        "np.exp(s - lse[:, None])",
    ),
    Fault(
        "sums of 16 bits", REFERENCE,
        "return x.sum(axis=-1, dtype=x.dtype if x.dtype.itemsize >= 4 else np.float32).astype(x.dtype)",
        "return x.sum(axis=-1, dtype=x.dtype)",
    ),
    Fault(
        "a FULL tile is masked", REFERENCE,
        "if head.spec.mask is not None and state != FULL:",
        "if head.spec.mask is not None and state == EMPTY:",
    ),
    Fault(
        "corners of tiles without the offset", REFERENCE,
        '"q0": row0 + head.offset, "q1": row1 + head.offset',
        '"q0": row0, "q1": row1',
    ),
)  # fmt: skip
