# Dropout of P and dP by a counter-based generator (flashkit/mods/dropout.py): the forward and the backward pass compute
# the same bits from (seed, batch entry, head, row, key).

U, LOW = np.uint64, np.uint64(0xFFFFFFFF)


@device
def philox(seed, key_group, row, h, b):
    """Philox-4x32-10: four words, for keys 4 * key_group ... 4 * key_group + 3 of a row."""
    c0, c1, c2, c3 = U(key_group) & LOW, U(row) & LOW, U(h) & LOW, U(b) & LOW
    key0, key1 = seed & LOW, seed >> U(32)
    for _ in range(10):
        product0, product1 = U(0xD2511F53) * c0, U(0xCD9E8D57) * c2
        c0, c1 = (product1 >> U(32)) ^ c1 ^ key0, product1 & LOW
        c2, c3 = (product0 >> U(32)) ^ c3 ^ key1, product0 & LOW
        key0, key1 = (key0 + U(0x9E3779B9)) & LOW, (key1 + U(0xBB67AE85)) & LOW
    return c0, c1, c2, c3


@device
def drop(x, p, b, h, row, key):
    """An element of P or dP, dropped or scaled."""
    word0, word1, word2, word3 = philox(p.seed, key >> 2, row, h, b)
    lane = key & 3
    word = word0 if lane == 0 else word1 if lane == 1 else word2 if lane == 2 else word3
    return x * F(p.dropout_scale) if word >= p.dropout_threshold else ZERO
