// S^T, P^T, dP^T and dS^T of 64 keys in the registers of a warp group: where each element is, and the products from and
// into them.
//
// Keys are the rows, as wgmma leaves them. Element 4 n + 2 half + c of a lane is at
//
//     key lane_key(half) of the 64,     row lane_row(n, c) of the query tile
//
// so four lanes share a key.
#pragma once
#include "sm90/bwd_layout.cuh"

DEVICE int lane_key(int half) { return threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4; }
DEVICE int lane_row(int n, int c) { return 8 * n + threadIdx.x % 4 * 2 + c; }

// Row statistics (log-sum-exps or deltas) of elements 4 n ...: [c]. address: lane_stats() bytes into the tile's.
DEVICE unsigned lane_stats(int lane) { return lane % 4 * 8; }
DEVICE void load_row_stats(float (&x)[2], unsigned address, int n) { load_float2(x, address + 32 * n); }

// Query tile n and work tile `number` of the CTA, and which 64 of the work tile's keys: the warp group's or, in a
// cluster, the CTA's.
struct FragmentId { unsigned base, n, number; int key_group; };

struct FragmentCoord {
    int b, h, row0, k0;
    SeqSlot seq;
    unsigned nonfinite_keys;  // address of a bit for each key of the CTA
    int first_key;            // of the 64 keys among the CTA's
};
// From shared memory, as it is rarely needed and would always take registers.
DEVICE FragmentCoord coord_of(const Params& p, const FragmentId& id) {
    const unsigned desc = tile_desc_slot(id.base, id.n), slot = work_tile_slot(id.base, id.number);
    const int b = load_word(slot);
    return {b, load_word(desc + TileDesc::HEAD), (load_word(desc) >> 8) * BLOCK_Q,
            load_word(slot + 8) + WARPGROUP_KEYS * id.key_group, seq_of(p, b, slot),
            nonfinite_keys_slot(id.base, id.number),
            CLUSTER_SIZE > 1 ? 0 : WARPGROUP_KEYS * id.key_group};
}

// Whether positions and their differences fit 32 bits. A vote, so that the compiler knows it is uniform.
constexpr long long NEAR_POSITIONS = 1 << 26;
DEVICE bool positions_are_near(const Params& p, long long offset) {
    constexpr long long most = NEAR_POSITIONS;
    return __all_sync(~0u, offset >= -most && offset + max_n_q(p) < most && max_n_k(p) < most);
}

// --- products --------------------------------------------------------------------------------------------------------
// Issued and committed here, awaited by the main loop.

// S^T = K Q^T or dP^T = V dO^T of 64 keys: both operands in shared memory.
template <int PADDED_COLUMNS>
DEVICE void issue_ss(float (&x)[S_REGS], unsigned keys, unsigned rows) {
    const unsigned long long a = descriptor(keys), b = descriptor(rows);
    wgmma_fence();
    wgmma_zero_init<0, 0>(x, a, b);
#pragma unroll
    for (int k = 1; k < PADDED_COLUMNS / 16; ++k)
        product<0, 0>(x, a + along_rows(k, CTA_KEYS), b + along_rows(k, BLOCK_Q), 1);
    wgmma_commit();
}

// dV += P^T dO or dK += dS^T Q, with P^T or dS^T from registers.
template <int N>
DEVICE void issue_rs(float (&acc)[N], const unsigned (&left)[S_REGS / 2], unsigned rows, bool accumulate) {
    const unsigned long long b = descriptor(rows, BLOCK_Q * CHUNK_ROW);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_Q / 16; ++k) wgmma_rs<1>(acc, left, 4 * k, b + along_columns(k), k > 0 || accumulate);
    wgmma_commit();
}
