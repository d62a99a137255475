# parts: sm90/softmax sm90/epilogue
# The consumer's main loop: 64 rows of a work tile for each warp group, as in FlashAttention-3.
#
# S(n) = Q K(n)^T is issued together with O += P(n-1) V(n-1); the softmax of tile n overlaps with the second product.
# Two warp groups ping-pong: one issues its products while the other takes exponentials. The pipeline does not drain
# between work tiles: S of the next one is issued before the last PV of this one, and its epilogue follows in the same
# block.
#
# A block is a K/V tile seen from a warp group. Three instances of mma_block cover all cases: the steady state (a PV is
# pending, all rows have a reference, nothing is masked), the general block, and the block without a pending PV. Both
# flags are literals, as the assembler serialises wgmmas that are issued conditionally.

# Of the work tile whose O is in registers: (b, h, row0), O, the packed P that waits for its V, row reference in base 2,
# row sum, and whether all rows of the warp have a reference that is likely to hold.
ConsumerState = namedtuple("ConsumerState", "work o p m l has_row_ref")

# A K/V tile: its index in the pipeline, its first key; the work tile's index among this CTA's and the descriptor of its
# Q; whether the pending PV adds to O or starts it, and how many of the pending tile's keys exist.
Block = namedtuple("Block", "n k0 number q accumulate valid_keys")


@device
def ping_pong_sync(wg):
    if PING_PONG:
        named_barrier_sync(PING_PONG_BARRIER + wg, 256)


@device
def ping_pong_arrive(wg):
    if PING_PONG:
        named_barrier_arrive(PING_PONG_BARRIER + (0 if wg + 1 == MMA_WARPGROUPS else wg + 1), 256)


# --- products ---------------------------------------------------------------------------------------------------------

qk_product = wgmma(STORAGE, BLOCK_K, along_rows(HEAD_DIM, 64), along_rows(HEAD_DIM, BLOCK_K), fresh=True)
pv_product = wgmma_registers(STORAGE, COLUMNS, along_columns(BLOCK_K), trans_b=True)


@device
def issue_qk(base, q, n):
    """S = Q K(n)^T"""
    k = descriptor(base, 16) + (AT_K >> 4) + stage_of(n, STAGES) * (BYTES_K >> 4)  # descriptors count 16 bytes
    wgmma_fence()
    s = qk_product(q, k)
    wgmma_commit()
    return s


@device
def issue_pv(base, wg, n, o, p_packed, accumulate, valid_keys):
    """O += P V(n)"""
    tile = base + AT_V + stage_of(n, STAGES) * BYTES_V
    consumer_wait(base + AT_V_PIPE, n, STAGES)
    if HAS_LENGTHS:
        if valid_keys < BLOCK_K:
            clear_rows(tile, max(valid_keys, 0), BLOCK_K, BLOCK_K, chunks_v)
            named_barrier_sync(WARPGROUP_BARRIER + wg, 128)
    v = descriptor(base, BLOCK_K * CHUNK_ROW) + (AT_V >> 4) + stage_of(n, STAGES) * (BYTES_V >> 4)
    wgmma_fence()
    o = pv_product(o, p_packed, v, accumulate)
    wgmma_commit()
    return o


@device
def finish_pv(base, n, o, p_packed):
    wgmma_wait(0)
    o, p_packed = fence_operand(o), fence_operand(p_packed)
    consumer_release(base + AT_V_PIPE, n, STAGES)
    return o, p_packed


@device
def drain_pv(base, wg, block, state):
    """The pending PV by itself: where no S goes with it, or where the next Q needs this one's only buffer."""
    work, o, p_packed, m, l, has_row_ref = state
    o = issue_pv(base, wg, block.n - 1, o, p_packed, block.accumulate, block.valid_keys)
    o, p_packed = finish_pv(base, block.n - 1, o, p_packed)
    return ConsumerState(work, o, p_packed, m, l, has_row_ref)


# --- blocks -----------------------------------------------------------------------------------------------------------


@device
def read_work_tile(base, number, wg):
    consumer_wait(base + AT_Q_PIPE, number, Q_BUFFERS)
    slot = work_tile_slot(base, number)
    row0 = uniform(load_word(slot + 8)) + 64 * wg
    return uniform(load_word(slot)), uniform(load_word(slot + 4)), i32(row0)


@device
def wait_tile_desc(base, n, wg_bits):
    """The tile descriptor, which comes with K(n); and 0 if its bits `wg_bits`, the warp group's, say that the tile is
    FULL and not the first of a work tile.
    """
    n = u32(n)
    consumer_wait(base + AT_K_PIPE, n, STAGES)
    tile_desc = uniform(load_word(tile_desc_slot(base, n)))
    return tile_desc, i32((tile_desc ^ 21 * FULL) & wg_bits)


@device
def depends_on(x):
    """0, which the compiler cannot know: what uses it is not scheduled before x. No computation produces this NaN."""
    return 1 if as_int(x) == 0x7FA12345 else 0


@device
def mma_block(p, base, wg, wg_bits, scale_log2, pv_pending, unmasked, first_tile, full, block, state):
    """Tile n from S to P, and the PV of the tile before. Returns the state, and the next tile's descriptor."""
    n, k0, number, q, accumulate, valid_keys = block
    work, o, p_packed, m, l, has_row_ref = state
    previous, m_before, l_before = work, m, l
    if not unmasked and first_tile:
        work = read_work_tile(base, number, wg)
        m, l = NO_REFERENCE, ZERO_ROWS

    ping_pong_sync(wg)
    s = issue_qk(base, q, n)
    if pv_pending:
        o = issue_pv(base, wg, n - 1, o, p_packed, accumulate, valid_keys)
    ping_pong_arrive(wg)
    if pv_pending:
        wgmma_wait(1)  # S is complete, PV may be in flight
    else:
        wgmma_wait(0)

    s = modified(p, work, unmasked or full, fence_operand(s), k0)
    first = not unmasked and first_tile
    if first:
        m, has_row_ref = guess_row_ref(s, scale_log2)
    total, rescale, holds = ZERO_ROWS, ZERO_ROWS, False
    speculative = unmasked or has_row_ref
    if speculative:
        s, total, holds = speculative_softmax(s, m, scale_log2)
    rescales = not holds
    if rescales:
        if speculative:  # mispredicted: the exponentials have overwritten S
            s = recompute_qk(q_rows(base, number, wg), base + AT_K + stage_of(n, STAGES) * BYTES_K)
            s = modify_tile(p, work, unmasked or full, s, k0)
        if first:
            m = NO_REFERENCE
        s, m, total, rescale = online_softmax(s, m, scale_log2)
        l = both(times, l, rescale)
        has_row_ref = all_lanes(repeat(reference_holds, ROWS, True, (m, rescale, first)))
    l = both(add, l, total)

    if unmasked:
        consumer_release(base + AT_K_PIPE, n, STAGES)
    else:  # the dependence keeps exponentials from being scheduled behind the next wait
        consumer_release(base + AT_K_PIPE, n + depends_on(total[0]) + depends_on(total[1]), STAGES)
    if pv_pending:
        o, p_packed = finish_pv(base, n - 1, o, p_packed)
    if not unmasked and first_tile:
        if pv_pending and Q_BUFFERS > 1:
            epilogue(p, base, previous, number - 1, wg, m_before, l_before, o)
    elif rescales:
        o = rows_scaled(o, rescale)
    if HAS_DROPOUT:
        s = dropout_tile(p, work, s, k0)
    next_desc = wait_tile_desc(base, n + 1, wg_bits)  # its latency is hidden behind packing P
    return ConsumerState(work, o, join(pack, s), m, l, has_row_ref), next_desc


@device
def skip_block(base, wg, n):
    """A tile that is EMPTY for this warp group, but not for another one."""
    ping_pong_sync(wg)
    ping_pong_arrive(wg)
    consumer_release(base + AT_K_PIPE, n, STAGES)
    consumer_wait(base + AT_V_PIPE, n, STAGES)
    consumer_release(base + AT_V_PIPE, n, STAGES)


@device
def consumer(p, base, wg):
    # uniform: or it is computed for each tile, in float64.
    scale_log2 = as_float(uniform(as_int(softmax_scale_log2(p))))
    zero, wg = i32(0), i32(wg)
    wg_bits = i32(FIRST_TILE | 3 << 2 * wg)  # of a tile descriptor
    state = ConsumerState((zero, zero, zero), filled(ZERO, O_REGS), filled(u32(0), P_REGS), NO_REFERENCE, ZERO_ROWS, NO)
    work_tile_open = False  # O belongs to a work tile whose epilogue is to come
    first_tile = False  # the current tile begins another work tile
    pv_pending = False
    number, q = i32(-1), u32(0)  # of the current tile's work tile
    accumulate, valid_keys = i32(0), i32(0)  # of the pending PV
    if PING_PONG and wg == MMA_WARPGROUPS - 1:
        ping_pong_arrive(wg)
    n, next_desc = u32(0), wait_tile_desc(base, u32(0), wg_bits)
    while True:
        tile_desc, unsteady = next_desc
        k0 = i32((tile_desc >> 8) * BLOCK_K)
        if pv_pending and state.has_row_ref and unsteady == 0:
            block = Block(n, k0, number, q, accumulate, valid_keys)
            state, next_desc = mma_block(p, base, wg, wg_bits, scale_log2, True, True, False, True, block, state)
            accumulate = i32(1)
        else:
            if tile_desc & FIRST_TILE:  # also END
                first_tile, number = True, i32(number + 1)
                q = descriptor(q_rows(base, number, wg), 16)
            kind = EMPTY if tile_desc == END else tile_desc >> 2 * wg & 3
            block = Block(n, k0, number, q, accumulate, valid_keys)
            if pv_pending and (kind == EMPTY or (Q_BUFFERS == 1 and first_tile)):
                state, pv_pending = drain_pv(base, wg, block, state), False
            if first_tile and work_tile_open and not pv_pending:
                epilogue(p, base, state.work, number - 1, wg, state.m, state.l, state.o)
                work_tile_open = False
            if tile_desc == END:
                break
            if kind == EMPTY:
                skip_block(base, wg, n)
                next_desc = wait_tile_desc(base, n + 1, wg_bits)
            else:
                full = kind == FULL
                if pv_pending:
                    state, next_desc = mma_block(
                        p, base, wg, wg_bits, scale_log2, True, False, first_tile, full, block, state
                    )
                else:
                    state, next_desc = mma_block(
                        p, base, wg, wg_bits, scale_log2, False, False, first_tile, full, block, state
                    )
                pv_pending, work_tile_open, accumulate, first_tile = True, True, i32(0 if first_tile else 1), False
        if HAS_LENGTHS:
            if pv_pending:
                valid_keys = i32(seq_info(p, state.work[0]).n_k - k0)
        n = u32(n + 1)
