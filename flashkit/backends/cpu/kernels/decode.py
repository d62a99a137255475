"""Forward pass of few queries by split-KV (flash-decoding: Dao, Haziza, Massa, Sizov 2023): each key is read once.

A work tile is a split of the keys of one key/value head, or several heads with few keys. The queries of all query heads
of a group are packed as rows. Scores have one row per query and keys along the lanes. Each split leaves o_partial, m
and l; the thread that completes the last split combines them in the order of the splits, so the result does not depend
on which thread computed what. specialise.py puts common.py, the operands and the K/V loader before this text.

    Q    [rows][D]           queries, row g * n_q + i: query i of the group's head g; padded with 0, and so are the
                             columns for K and those for K_PE
    S    [rows][keys]        scores, then P, or P times the values' scales, of one tile or of a stretch of FULL tiles
    O    [rows][DV]          o_partial of the split, before it is divided by l
    m, l [rows]              row_max and row_sum of the split
    states, ends [group]     state of the current tiles for each query head, and where it ends
"""


@njit(**options)
def words(args, width):
    """Words of `width` columns of a query, whole vectors."""
    step = K_PACK * args[LANES]  # a power of two
    return ((width + step - 1) & -step) // K_PACK


@njit(**options)
def load_q(args, seq, b, head_kv, target):
    width = args[DIM] - args[DIM_PE]
    end = words(args, width)
    for g in range(args[GROUP]):
        q = q_rows(args, Q, seq, b, head_kv * args[GROUP] + g, 0, seq.n_q, args[DIM])
        for i in range(seq.n_q):
            row = target[g * seq.n_q + i]
            load_query(q[i, :width], row[:end])
            load_query(q[i, width:], row[end:])


@njit(**options)
def scores_of(args, tensor, seq, b, head_kv, k0, q, width, s):
    """scale * Q K^T over the columns of K or of K_PE, in place."""
    done, n = np.int64(0), s.shape[1]
    while done < n:
        run = kv_run(args, b, k0 + done, n - done)
        k = kv_rows(args, tensor, seq, b, head_kv, k0 + done, run, width)
        prefetch_run(args, tensor, seq, b, head_kv, k0 + done + run, k0 + n, width)
        call_gemv_qk(args[GEMV_QK], q, k, s[:, done : done + run], width, args[SCALE])
        if SCALED:
            scale = kv_scales(args, K, K_SCALE, b, head_kv, k0 + done, run)
            for i in range(s.shape[0]):
                for j in range(run):
                    s[i, done + j] *= scale[j] * KV_UNIT
        done += run


@njit(**options)
def scores(args, seq, b, head_kv, k0, q, s, s_pe):
    """S = scale * Q K^T."""
    width = args[DIM] - args[DIM_PE]
    scores_of(args, K, seq, b, head_kv, k0, q, width, s)
    if args[DIM_PE] != 0:
        scores_of(args, K_PE, seq, b, head_kv, k0, q[:, words(args, width) :], args[DIM_PE], s_pe)
        for i in range(s.shape[0]):
            for j in range(s.shape[1]):
                s[i, j] += s_pe[i, j]


@njit(**options)
def modify_heads(args, seq, states, s, b, head_kv, k0):
    """modify, for the rows of each query head."""
    for g in range(args[GROUP]):
        rows = s[g * seq.n_q : (g + 1) * seq.n_q]
        if states[g] == EMPTY:
            rows[:] = -np.inf
        else:
            modify(args, seq, states[g], rows, 0, b, head_kv * args[GROUP] + g, 0, k0)


@njit(**options)
def accumulate(args, seq, b, head_kv, k0, p, o, rescale, nonfinite):
    """O = O * rescale + P V, with V in place."""
    done, n = np.int64(0), p.shape[1]
    while done < n:
        run = kv_run(args, b, k0 + done, n - done)
        v = kv_rows(args, V, seq, b, head_kv, k0 + done, run, args[DIM_V])
        prefetch_run(args, V, seq, b, head_kv, k0 + done + run, k0 + n, args[DIM_V])
        if SCALED:
            scale = kv_scales(args, V, V_SCALE, b, head_kv, k0 + done, run)
            for i in range(p.shape[0]):
                for j in range(run):
                    p[i, done + j] = 0 if p[i, done + j] == 0 else p[i, done + j] * (scale[j] * KV_UNIT)
        accumulate_rows(args, p[:, done : done + run], v, o, rescale, nonfinite)
        rescale[:] = 1
        done += run


@njit(**options)
def accumulate_rows(args, p, v, o, rescale, nonfinite):
    if not nonfinite:
        call_gemv_pv(args[GEMV_PV], p, v, o, rescale)
        return
    for i in range(p.shape[0]):
        for c in range(o.shape[1]):
            o[i, c] *= rescale[i]
        for j in range(p.shape[1]):
            if p[i, j] != 0:  # 0 * NaN and 0 * inf count as 0
                for c in range(o.shape[1]):
                    o[i, c] += p[i, j] * widen_kv(v[j, c])


@njit(**options)
def partials(args, slot, rows):
    """o_partial, m and l of a split, and the sum of P (S - m) of each row."""
    dv = args[DIM_V]
    address = args[SCRATCH] + args[PARTIALS] + slot * args[PARTIAL_BYTES]
    at = partial_layout(rows, dv, ACCUM_SIZE)
    m, l, sums = accum_row(address + at.m, rows), accum_row(address + at.l, rows), accum_row(address + at.stats, rows)
    return accum_tile(address, rows, dv, dv * ACCUM_SIZE), m, l, sums


@njit(**options)
def store_statistics(args, seq, b, head_kv, first_slot, num_splits):
    """Combine those of the splits."""
    rows = args[GROUP] * seq.n_q
    for row in range(rows):
        h, i = head_kv * args[GROUP] + row // seq.n_q, row % seq.n_q
        sink = accum_row(args[SINKS], args[HEADS])[h] if args[SINKS] != 0 else ACCUM(-np.inf)
        row_max, row_sum, total = ACCUM(-np.inf), ACCUM(0), ACCUM(0)
        for slot in range(first_slot, first_slot + num_splits):
            _, m, l, of_split = partials(args, slot, rows)
            if l[row] != 0:
                common = max(row_max, m[row])
                total = moved(total, row_sum, row_max, common) + moved(of_split[row], l[row], m[row], common)
                row_sum = exp_below(row_max - common) * row_sum + exp_below(m[row] - common) * l[row]
                row_max = common
        entropy, top = row_statistics(row_max, row_sum, total, row_max, sink)
        q_stats(args, ENTROPY, seq, b, h, i, 1)[0] = entropy
        q_stats(args, MAX_LOGIT, seq, b, h, i, 1)[0] = top


@njit(**options)
def exp_below(x):
    """e^x, x <= 0; the two usual cases of a single split at once."""
    if x == 0:
        return ACCUM(1)
    return ACCUM(0) if x == -np.inf else np.exp(x)


@njit(**options)
def weighted(o, weight, out):
    """out = weight * o, 0 where the weight is."""
    if weight == 0:
        for c in range(len(out)):
            out[c] = narrow(ACCUM(0))
    else:
        for c in range(len(out)):
            out[c] = narrow(weight * o[c])


@njit(**options)
def epilogue(args, b, head_kv, first_slot, num_splits):
    """Combine the splits, divide by the row_sum, and store O and the LSE."""
    seq = seq_info(args, b, head_kv * args[GROUP])
    n_q, dv, rows = seq.n_q, args[DIM_V], args[GROUP] * seq.n_q
    slots = range(first_slot, first_slot + num_splits)
    o_acc, _, _, _ = partials(args, first_slot, rows)
    if args[ENTROPY] != 0:
        store_statistics(args, seq, b, head_kv, first_slot, num_splits)
    for g in range(args[GROUP]):
        h = head_kv * args[GROUP] + g
        out = q_rows(args, OUT, seq, b, h, 0, n_q, dv)
        lse = q_stats(args, LSE, seq, b, h, 0, n_q)
        # The sink is one more logit in the sum, without a value.
        sink = accum_row(args[SINKS], args[HEADS])[h] if args[SINKS] != 0 else ACCUM(-np.inf)
        for i in range(n_q):
            row = g * n_q + i
            row_max = sink
            for slot in slots:
                _, m, _, _ = partials(args, slot, rows)
                row_max = max(row_max, m[row])
            m_safe = ACCUM(0) if row_max == -np.inf else row_max
            row_sum = exp_below(sink - m_safe)
            for slot in slots:
                _, m, l, _ = partials(args, slot, rows)
                row_sum += exp_below(m[row] - m_safe) * l[row]
            lse[i] = -np.inf if row_sum == 0 else row_max + np.log(row_sum)
            for slot in slots:
                o_partial, m, _, _ = partials(args, slot, rows)
                # A split of weight 0 is skipped, whatever its o_partial holds.
                weight = ACCUM(0) if row_sum == 0 else exp_below(m[row] - m_safe) / row_sum
                if num_splits == 1:
                    weighted(o_partial[row], weight, out[i])
                elif slot == first_slot:
                    for c in range(dv):
                        o_acc[row, c] = 0 if weight == 0 else weight * o_partial[row, c]
                elif weight != 0:
                    for c in range(dv):
                        o_acc[row, c] += weight * o_partial[row, c]
            if num_splits > 1:
                weighted(o_acc[row], ACCUM(1), out[i])


@njit(**options)
def decode_split(args, seq, b, head_kv, start, stop, slot, scratch, nonfinite):
    """Keys start ... stop - 1 for all rows of a key/value head. Returns whether o_partial is finite."""
    # Tiles.
    d, d_pe, dv, n_q, group, block_k = args[DIM], args[DIM_PE], args[DIM_V], seq.n_q, args[GROUP], args[BLOCK_K]
    rows, stretch = group * n_q, TILES_PER_STRETCH * block_k
    views = args[V] == args[K] and args[V + 3] == args[K + 3]  # values are the first columns of the keys
    at_once = args[TILES_IN_CACHE] if views else TILES_PER_STRETCH
    q_words = words(args, d - d_pe) + words(args, d_pe)

    # Scratch memory.
    with_stats = args[ENTROPY] != 0
    at = decode_layout(rows, group, stretch, q_words, ACCUM_SIZE, 2 if d_pe != 0 else 1, with_stats)
    q = accum_tile(scratch, rows, q_words, q_words * ACCUM_SIZE)
    rescale = accum_row(scratch + at.rescale, rows)
    states, ends = vector(scratch + at.states, group, 8, np.int64), vector(scratch + at.ends, group, 8, np.int64)
    o_partial, m, l, sums = partials(args, slot, rows)

    for i in range(rows):
        m[i], l[i], sums[i] = -np.inf, 0, 0
        for c in range(dv):
            o_partial[i, c] = 0
    for g in range(group):
        ends[g] = 0
    load_q(args, seq, b, head_kv, q)

    tile, tiles = start // block_k, (stop + block_k - 1) // block_k
    while tile < tiles and not stopped(args):
        following, visible, full = tiles, False, True
        for g in range(group):
            if ends[g] <= tile:
                h = head_kv * group + g
                ends[g], states[g] = next_group(args, seq, b, h, 0, n_q, tile, tiles, block_k, stop, True)
            following = min(following, ends[g])
            visible |= states[g] != EMPTY
            full &= states[g] == FULL
        if not visible:
            tile = following
            continue
        k0 = tile * block_k
        following = min(following, tile + at_once) if full else tile + 1
        n = min(following * block_k, stop) - k0
        s = accum_tile(scratch + at.scores, rows, n, stretch * ACCUM_SIZE)
        s_pe = accum_tile(scratch + at.pe_scores, rows, n, stretch * ACCUM_SIZE)
        prefetch_run(args, V, seq, b, head_kv, k0, k0 + n, dv)
        scores(args, seq, b, head_kv, k0, q, s, s_pe)
        modify_heads(args, seq, states, s, b, head_kv, k0)
        if with_stats:
            copied = accum_tile(scratch + at.more, rows, n, stretch * ACCUM_SIZE)
            before = accum_tile(scratch + at.more + rows * stretch * ACCUM_SIZE, 2, rows, rows * ACCUM_SIZE)
            copied[:], before[0], before[1] = s, m, l
        call_gemv_softmax(args[GEMV_SOFTMAX], s, m, l, rescale)  # S to P; `accumulate` rescales o_partial
        if with_stats:
            for i in range(rows):
                sums[i] = moved(sums[i], before[1, i], before[0, i], m[i]) + entropy_sum(copied[i], s[i], m[i])
        if args[DROPOUT] != 0:
            for g in range(group):
                dropout(args, s[g * n_q : (g + 1) * n_q], False, b, head_kv * group + g, 0, k0)
        accumulate(args, seq, b, head_kv, k0, s, o_partial, rescale, nonfinite)
        tile = following

    finite = True
    for i in range(rows):
        for c in range(dv):
            finite &= o_partial[i, c] * 0 == 0
    return finite


@entry(types.void(types.int64, types.int64))
def decode(address, thread):
    args = vector(address, SIZE, 8, np.int64)
    scratch = args[SCRATCH] + thread * args[SCRATCH_BYTES]
    num_splits, heads_kv = args[NUM_SPLITS], args[HEADS] // args[GROUP]
    work_tile = next_kv_heads(args)
    while work_tile.valid:
        b, head_kv = work_tile.first // heads_kv, work_tile.first % heads_kv
        start = work_tile.split * args[SPLIT_KEYS]
        slot = thread if num_splits == 1 else work_tile.number
        for head in range(work_tile.first, work_tile.last):
            seq, next_b, next_head = seq_info(args, b, head_kv * args[GROUP]), b, head_kv + 1
            if next_head == heads_kv:
                next_b, next_head = b + 1, np.int64(0)
            if head + 1 < work_tile.last:
                following = seq_info(args, next_b, next_head * args[GROUP])
                prefetch_run(args, K, following, next_b, next_head, start, following.n_k, args[DIM])
            stop = min(start + args[SPLIT_KEYS], seq.n_k)
            # P = 0 times an infinity that the mask hides is NaN, which is rare: the non-finite fallback.
            for nonfinite in range(2):
                if decode_split(args, seq, b, head_kv, start, stop, slot, scratch, nonfinite):
                    break
            if num_splits == 1:
                epilogue(args, b, head_kv, slot, 1)
            b, head_kv = next_b, next_head
        if num_splits > 1 and atomic_arrive(address + 8 * SPLITS_DONE) + 1 == args[WORK_TILES]:
            for head in range(args[BATCH] * heads_kv):
                epilogue(args, head // heads_kv, head % heads_kv, head * num_splits, num_splits)
        work_tile = next_kv_heads(args)
