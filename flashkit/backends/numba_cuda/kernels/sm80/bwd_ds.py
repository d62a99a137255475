# parts: sm80/bwd_softmax
# dS in registers.


@device
def minus_delta(x, row, _):
    return x - row[2]


@device
def visit_element(ds, column, row, rest):
    p, pairs = rest
    query, key = pair_of(column, row, pairs)
    visit_ds(ds, pairs.b, pairs.h, query, query + pairs.q_position, key, p)
    return ds


@device
def store_ds(p, at, ds, rows, pairs):
    if VISITS_DS:
        ds = each_at(visit_element, ds, rows, (p, pairs))
    groups(store_fragment, FRAGMENT, join(pack, ds), at)


@device
def compute_ds(p, at, full, dp, p_slope, dropped, rows, pairs):
    """dP to dS = P (dP - delta), which goes to shared memory for the products of dQ and dK."""
    if not MAY_HIDE or (full and not HAS_SCORE and not HAS_DROPOUT):
        ds = both(times, p_slope, each(minus_delta, dp, rows, 0))
        store_ds(p, at, ds, rows, pairs)
    else:
        if HAS_DROPOUT:
            dp = both(times_nonzero, dropped, dp)
        ds = both(times_nonzero, p_slope, each(minus_delta, dp, rows, 0))
        store_ds(p, at, ds, rows, pairs)
