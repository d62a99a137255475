"""Pictures of masks and of attention weights: in notebooks, and with matplotlib."""

import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

import flashkit
from flashkit import BlockMask, mods
from flashkit.mods import svg

mpl = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
mpl.use("agg")


def grid(html: str, rows: int, columns: int) -> np.ndarray:
    """The classes of the squares of a picture."""
    root = ElementTree.fromstring(html.replace("<br>", "<br/>"))
    drawing = root.find("svg")
    assert drawing is not None
    frame, *squares = drawing.findall("rect")
    side = float(frame.attrib["height"]) / rows
    assert float(frame.attrib["width"]) == side * columns
    found = np.zeros((rows, columns), int)
    classes = {colour: state for state, colour in svg.COLOURS.items()}
    for square in squares:
        x, y, width, height = (round(float(square.attrib[name]) / side) for name in ("x", "y", "width", "height"))
        assert height == 1
        found[y, x : x + width] = classes[square.attrib["fill"]]
    return found


def test_block_masks_in_notebooks() -> None:
    mask = BlockMask.from_mod(mods.causal(), 512, 640)
    html = mask._repr_html_()
    np.testing.assert_array_equal(grid(html, 4, 5), mask.to_dense()[0, 0])
    assert "4 x 5 tiles of 128 x 128" in html


def test_large_block_masks_are_drawn_in_larger_tiles() -> None:
    mask = BlockMask.from_mod(mods.sliding_window(1 << 16), 1 << 24, 1 << 24)
    html = mask._repr_html_()
    found = grid(html, 64, 64)
    np.testing.assert_array_equal(np.diag(found), 1)
    assert found.sum() == 64 + 63 and len(html) < 20_000


def test_mods_in_notebooks() -> None:
    np.testing.assert_array_equal(grid(mods.causal()._repr_html_(), 32, 32), 2 * np.tri(32, dtype=int))
    for mod in (mods.softcap(2.0), mods.visible(np.ones((3, 3), bool))):  # a score, and an array that is too short
        html = mod._repr_html_()
        assert "svg" not in html and re.fullmatch(r"<code>&lt;(score|mask) mod .*&gt;</code>", html, re.DOTALL)


def test_explanations_in_notebooks() -> None:
    q = np.zeros((1, 2, 4, 8), np.float32)
    html = flashkit.explain(q, q, q)._repr_html_()
    assert html.startswith("<pre>float32, batch 1") and "-&gt; " in html and "->" not in html


def test_weights_are_drawn() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 2, 6, 30, 8))
    figure = flashkit.plot_weights(q, k, rows=slice(10, 20), heads=[4, 0, 5, 1, 2], batch=1, causal=True)
    pictures = [ax for ax in figure.axes if ax.images and ax.get_title()]
    assert [ax.get_title() for ax in pictures] == [f"head {h}" for h in (4, 0, 5, 1, 2)]
    expected = flashkit.weights(q, k, rows=slice(10, 20), heads=[4, 0, 5, 1, 2], causal=True)[1]
    for ax, values in zip(pictures, expected, strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array(), values)
        assert ax.get_yticklabels()[0].get_text() == "10"
    with pytest.raises(ValueError, match=r"batch: expected .* got 2"):
        flashkit.plot_weights(q, k, batch=2)
    own = mpl.figure.Figure()
    assert flashkit.plot_weights(q[0, 0], k[0, 0], rows=-1, figure=own) is own


def test_without_matplotlib_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib$"):
        flashkit.plot_weights(np.zeros((4, 8)), np.zeros((4, 8)))
