# parts: common/tiles
# Where the keys and values of a sequence come from: dense tensors.

# Tensors; batch entry and key/value head; the row of key 0; the number of keys.
KvSource = namedtuple("KvSource", "k v b head start n_k")


@device
def kv_source(p, b, head, n_k):
    return KvSource(p.k, p.v, b, head, kv_token(p, b, I(0)), n_k)
