# parts: common/epilogue
# The forward epilogue: consumers normalise O and write it to shared memory, the store warp sends it to global memory.


@device
def stage_columns(i, words, rest):
    """16 columns of a warp's 16 rows of O to shared memory."""
    staged, row, lane = rest
    place = swizzled(row, i % 4 * 2 + lane // 16)
    stmatrix_x4(staged + i // 4 * 64 * CHUNK_ROW + place, words[0], words[1], words[2], words[3])


@device
def epilogue(p, base, at, number, wg, m, l, output):
    """O / l and the log-sum-exp of work tile `number` of this CTA."""
    at = opaque(at[0]), opaque(at[1]), opaque(at[2])
    output, factor, is_nonfinite = normalize_rows(p, at, m, l, output)
    staged = q_rows(base, number, wg)
    named_barrier_sync(WARPGROUP_BARRIER + wg, 128)  # no warp of the warp group reads Q any more
    lane = opaque(thread() % 32)
    row = opaque(thread() % 128 // 32) * 16 + lane % 16
    groups(stage_columns, 4, join(pack, output), (staged, row, lane))
    if MAY_HIDE:
        if any_lane(is_nonfinite):
            lanes_sync()
            accumulate_nonfinite(p, at, m, factor, staged, 64)
    fence_proxy_async()
    lanes_sync()
    mbarrier_arrive_once(out_ready(base, number, wg))


@device
def store_warp(p, base):
    """One thread of it stores each work tile's O by TMA and releases the buffer of Q that it lay in."""
    number = u32(0)
    while True:
        buffer = stage_of(number, Q_BUFFERS)
        slot, parity = base + AT_WORK_TILES + 12 * buffer, u32(number) // u32(Q_BUFFERS) & 1
        consumer_wait(base + AT_Q_PIPE, number, Q_BUFFERS)
        b, h = load_word(slot), load_word(slot + 4)
        if b == END:
            break
        for wg in range(MMA_WARPGROUPS):
            row0, place = load_word(slot + 8) + 64 * wg, buffer * MMA_WARPGROUPS + wg
            mbarrier_wait_backoff(base + AT_OUT_READY + 8 * place, parity, BACKOFF_NS)
            if row0 < i32(p.n_q):
                for c in range(chunks_v):
                    source = base + place * BYTES_Q + c * 64 * CHUNK_ROW
                    tma_store(map_address("map_out"), source, 64 * c, row0, 0, h, b)
            bulk_commit()
        bulk_wait_read(0)
        mbarrier_arrive(base + AT_Q_PIPE + 8 * Q_BUFFERS + 8 * buffer)
        number = u32(number + 1)
    bulk_wait()
