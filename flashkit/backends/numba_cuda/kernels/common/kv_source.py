# parts: common/tiles
# Where the keys and values of a sequence come from: dense tensors, or pages.

# Tensors; batch entry and key/value head; the row of key 0; the number of keys; the pages of the sequence.
KvSource = namedtuple("KvSource", "k v b head start n_k table")


@device
def kv_source(p, b, head, n_k):
    return KvSource(p.k, p.v, b, head, kv_token(p, b, I(0)), n_k, page_table(p))


@device
def kv_address(kv, tensor, n):
    """Address of row n of K or V. In pages, one past the last is the last: the table may end there."""
    if IS_PAGED:
        page, row = page_and_row(kv.table, kv.b, I(min(n, kv.n_k - 1)))
        return row_address(tensor, page, I(kv.head), row)
    return row_address(tensor, I(kv.b), I(kv.head), kv.start + n)
