"""`weights` and `plot_weights`: the attention probabilities of some rows, to look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

import numpy as np

from ..errors import shown
from ..mods.tracing import as_array
from ..numeric import integer
from ..options import Options, by_position
from ..spec import Operands
from . import arrays
from .arguments import prepare
from .call import Call
from .shape import HEADS_AND_TOKENS

_PAIRS = 1 << 20  # that are computed at once, in float64


@by_position
def weights(q: Any, k: Any, *, rows: Any = None, heads: Any = None, **given: Unpack[Options]) -> Any:
    """The attention probabilities of some rows and heads: what `attention` multiplies the values by.

    They are computed by the definition, in float64 on the host, for arrays of every kind. Memory is proportional to the
    rows and heads asked for, so single rows of long sequences can be looked at.

    Parameters
    ----------
    q, k
        As for `attention`.
    rows
        The queries: an integer, integers, or a slice; negative ones count from the last. All by default. In packed
        sequences they are tokens of q.
    heads
        The query heads, likewise.
    **given
        The other arguments of `attention`.

    Returns
    -------
    array
        (..., heads, rows, Nk) in any layout, of q's array type, float32 (float64 for float64 inputs). A row sums to 1;
        with sinks to less, without a visible key to 0. With dropout_p, weights are dropped and scaled. In packed
        sequences the last axis has the tokens of k, and with a page table the positions of the longest sequence.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, arXiv 1706.03762, section 3.2.1.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 1000, 64), dtype=np.float32)
    >>> found = flashkit.weights(q, k, rows=[10, -1], heads=3, causal=True)
    >>> found.shape, bool((found[0, 0, 0, 11:] == 0).all())
    ((1, 1, 2, 1000), True)
    >>> out = flashkit.attention(q, k, v, causal=True)
    >>> np.allclose(found[0, 0] @ v[0, 3], out[0, 3, [10, -1]], atol=1e-5)
    True
    """
    with Call("weights", q, k, k, {**given}) as call:
        call.dequantise()
        call.require_arrays()
        found = _weights(call, rows, heads)
        return found if call.foreign is None else call.foreign.from_native("weights", found)


def _weights(call: Call, rows: Any, heads: Any) -> Any:
    problem, operands, shape = prepare(call.q, call.k, call.k, described=True, **call.options)
    entries, n_heads, n_q, _ = operands.q.shape
    row, head = _chosen("rows", rows, n_q), _chosen("heads", heads, n_heads)
    n_k = problem.n_k if problem.spec.paged else operands.k.shape[2]
    result = np.zeros((entries, len(head), len(row), n_k), problem.spec.lse_dtype)
    if result.size:
        _fill(result, problem.spec, arrays.operands_on_host(operands), row, head)
    result = shape.rows(result)
    return result if problem.array_kind == "numpy" else arrays.namespace(problem.array_kind).asarray(result)


@by_position
def plot_weights(
    q: Any, k: Any, *, rows: Any = None, heads: Any = None, batch: int = 0, figure: Any = None, **given: Unpack[Options]
) -> Any:
    """Draw the attention probabilities of some rows with matplotlib, one picture for each head.

    Parameters
    ----------
    q, k, rows, heads
        As for `weights`.
    batch
        The batch entry, counted over all batch axes.
    figure
        A matplotlib figure to draw on; a new one by default.
    **given
        The other arguments of `attention`.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        matplotlib is not installed: pip install matplotlib.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 8, 100, 64), dtype=np.float32)
    >>> figure = flashkit.plot_weights(q, k, heads=[0, 5], causal=True)
    >>> [ax.get_title() for ax in figure.axes[:2]]
    ['head 0', 'head 5']
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plot_weights needs matplotlib: pip install matplotlib") from error
    all_weights = weights(q, k, rows=rows, heads=heads, **given)
    all_weights = arrays.on_host(all_weights)
    all_weights = all_weights.reshape((-1, *((1, 1, *all_weights.shape)[-3:])))
    batch = integer("batch", batch, 0, len(all_weights) - 1)
    of_heads = all_weights[batch]
    packed = given.get("cu_seqlens") is not None
    n_q, n_heads = _sizes(q, "bnhd" if packed else given.get("layout", "bhnd"))
    names, row = _chosen("heads", heads, n_heads), _chosen("rows", rows, n_q)
    columns = min(4, max(1, len(of_heads)))
    lines = -(-len(of_heads) // columns)
    if figure is None:
        figure = plt.figure(figsize=(3 * columns, 3 * max(1, lines)), layout="constrained")
    axes = figure.subplots(max(1, lines), columns, squeeze=False)
    image = None
    for ax, name, picture in zip(axes.flat, names, of_heads, strict=False):
        image = ax.imshow(picture, cmap="magma", vmin=0, vmax=of_heads.max(), aspect="auto", interpolation="nearest")
        ax.set(title=f"head {name}", xlabel="key", ylabel="query")
        ticks = np.unique(np.linspace(0, len(row) - 1, min(len(row), 6)).astype(int))
        ax.set_yticks(ticks, [str(row[i]) for i in ticks])
    for ax in axes.flat[len(of_heads) :]:
        ax.remove()
    if image is not None:
        figure.colorbar(image, ax=list(figure.axes), label="weight")
    return figure


def _sizes(q: Any, layout: str) -> tuple[int, int]:
    """Queries and query heads."""
    if q.ndim == 2:
        return q.shape[0], 1
    head_axis, token_axis = HEADS_AND_TOKENS[layout]
    return q.shape[token_axis], q.shape[head_axis]


def _chosen(name: str, wanted: Any, n: int) -> np.ndarray:
    """Indices from 0 to n - 1."""
    if wanted is None or isinstance(wanted, slice):
        return np.arange(n)[slice(None) if wanted is None else wanted]
    expected = f"integers from {-n} to {n - 1}"
    indices = np.atleast_1d(as_array(name, wanted, expected))
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise TypeError(f"{name}: expected {expected}, or a slice, got {shown(wanted)}")
    if indices.size and not (indices.min() >= -n and indices.max() < n):
        raise ValueError(f"{name}: expected {expected}, got values from {indices.min()} to {indices.max()}")
    indices = indices.astype(np.int64)
    return np.where(indices < 0, indices + n, indices)


def _fill(result: np.ndarray, spec: Any, operands: Operands, rows: np.ndarray, heads: np.ndarray) -> None:
    """Compute the weights, head by head and a few rows at a time."""
    from .. import reference

    for b in range(len(operands.q_offset)):
        first_row, first_key, entry = 0, 0, b
        if operands.cu_seqlens is not None:
            of_q, of_k = operands.cu_seqlens
            first_row, first_key, entry = int(of_q[b]), 0 if of_k is None else int(of_k[b]), 0
        for i, h in enumerate(heads):
            memory = {
                "q": arrays.on_host(reference.rows_of(operands, operands.q, b, h)),
                "k": arrays.on_host(reference.keys_of(operands, operands.k, b, h // spec.group)),
            }
            head = reference.Head(spec, operands, np.dtype(np.float64), b, int(h), memory, reference.Traffic())
            keys = slice(first_key, first_key + head.n_k)
            within = np.flatnonzero((rows >= first_row) & (rows < first_row + head.n_q))
            for part in _runs(rows[within], max(1, _PAIRS // max(1, head.n_k))):
                first = int(rows[within[part.start]]) - first_row
                of_head = reference.weights(head, slice(first, first + part.stop - part.start))
                result[entry, i, within[part], keys] = of_head


def _runs(rows: np.ndarray, most: int) -> Iterator[slice]:
    """Slices of `rows` that hold successive integers, up to `most` of them."""
    ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1), len(rows)]
    start = 0
    for end in ends:
        while start < end:
            yield slice(start, start := min(end, start + most))
