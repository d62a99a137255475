"""Dropout: the generator against its authors' known answers, and what a mask of dropped weights must be."""

import numpy as np
import pytest

from flashkit.mods import dropout

ONES = 0xFFFFFFFF
# The known answers that Random123 ships for philox4x32 with ten rounds: counter, key (low word, high word), result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def everywhere(seed: int, p: float, shape=(2, 3, 64, 64)) -> np.ndarray:
    return dropout.keep(seed, p, *np.ogrid[tuple(map(slice, shape))])


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert tuple(map(int, dropout.philox(counter, key[0] | key[1] << 32))) == words


def test_many_counters_at_once():
    counters = [np.array([c[i] for c, _, _ in KNOWN[:1]] * 3) for i in range(4)]
    for word, wanted in zip(dropout.philox(counters, 0), KNOWN[0][2]):
        assert word.dtype == np.uint32
        assert word.tolist() == [wanted] * 3


def test_the_words_are_those_of_the_pair():
    """Key k takes word k % 4 of the counter (k // 4, row, h, b): what every kernel computes."""
    seed, p = 0x0123456789ABCDEF, 0.4
    kept = everywhere(seed, p, (2, 2, 3, 11))
    for b, h, row, k in np.ndindex(kept.shape):
        word = int(dropout.philox((k // 4, row, h, b), seed)[k % 4])
        assert kept[b, h, row, k] == (word >= round(0.4 * 2**32))


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_fraction_dropped_is_p(p):
    kept = everywhere(1234, p, (1, 2, 512, 1024))
    deviation = np.sqrt(p * (1 - p) / kept.size)
    assert abs(1 - kept.mean() - p) < 5 * deviation
    # and so along every axis: no row, no key, no lane stands out
    for axis in (2, 3):
        means = kept.mean(axis=tuple(a for a in range(4) if a != axis))
        assert np.abs(1 - means - p).max() < 5.5 * np.sqrt(p * (1 - p) / (kept.size / kept.shape[axis]))


def test_the_same_seed_drops_the_same_and_the_kept_sets_nest():
    assert np.array_equal(everywhere(5, 0.3), everywhere(5, 0.3))
    assert not (everywhere(5, 0.6) & ~everywhere(5, 0.3)).any()


def test_thresholds():
    assert dropout.threshold(0.0) == 0
    assert dropout.threshold(0.5) == 1 << 31
    assert dropout.threshold(1.0) == ONES
    assert everywhere(3, 0.0).all()
    assert not everywhere(3, 1.0).any()
    word = int(dropout.philox((0, 7, 2, 1), 3)[0])
    assert [bool(dropout.keep(3, p / 2**32, 1, 2, 7, 0)) for p in (word, word + 1)] == [True, False]


def test_far_positions_are_distinct():
    """Rows and keys beyond 2^16, and seeds of all 64 bits."""
    k = np.arange(1 << 20, (1 << 20) + 256)
    near, far = dropout.keep(2**64 - 1, 0.5, 0, 0, 0, k), dropout.keep(2**64 - 1, 0.5, 0, 0, 1 << 20, k)
    assert 0.3 < (near == far).mean() < 0.7
