// Which work tile a CTA takes, and which tiles of it the mask leaves.
#pragma once
#include "common/fragment.cuh"

// Tiles along one axis that are not EMPTY, in shared memory: the registers of the main loops are needed for
// accumulators.
struct TileList {
    int entry[510];   // tile << 8 | State
    int count, next;  // entries; the first step of the walk that is not classified yet
    static __device__ __forceinline__ int tile(int entry) { return entry >> 8; }
    static __device__ __forceinline__ bool full(int entry) { return (entry & 3) == FULL; }
};

// Fills the list with the next tiles of first ... last - 1, backwards if `descending`; false if none is left. For all
// threads of a CTA. from ... to - 1: the range on the other axis. HEADS: heads h ... that share the tile.
template <int BLOCK, bool ALONG_KEYS, int HEADS>
DEVICE bool fill(TileList& list, const Params& p, int b, int h, int from, int to, int first, int last, int n,
                 bool descending = false) {
    __syncthreads();
    if (threadIdx.x < 32) {
        const long long q_position = seq_info(p, b).q_position;
        const auto tile_at = [&](int step, int steps) { return descending ? last - step - steps : first + step; };
        const auto state_of = [&](int step, int steps) {  // of the tiles of `steps` steps of the walk
            const int start = tile_at(step, steps) * BLOCK, whole = start + steps * BLOCK, end = whole < n ? whole : n;
            int state = EMPTY;
#pragma unroll 1
            for (int i = 0; i < HEADS; ++i) {
                const int found = ALONG_KEYS ? tile_state(p, b, h + i, q_position, from, to, start, end)
                                             : tile_state(p, b, h + i, q_position, start, end, from, to);
                state = i == 0 || state == found ? found : (int)PARTIAL;
            }
            return (unsigned)state;
        };
        int next = list.next;
        unsigned seen;
        const int count = fill(list, next, last - first, seen, state_of);
        for (int i = threadIdx.x; i < count; i += 32)
            list.entry[i] = tile_at(list.entry[i] >> 8, 1) << 8 | (list.entry[i] & 3);
        if (threadIdx.x == 0) list.count = count, list.next = next;
    }
    __syncthreads();
    return list.count > 0;
}

// Forward pass: the grid has a CTA for each work tile and split. The last query tiles come first: under a causal mask
// they have most to do.
template <bool SPLIT>
DEVICE TileCoord forward_tile(const Params& p, int heads, int tiles, int index) {
    const int all = heads * (int)num_entries(p), together = SPLIT ? all : (int)p.heads_per_l2_group;
    const TileCoord coord = tile_coord(index, tiles_before_lpt_tail(tiles), all, together);
    return {tiles - 1 - coord.tile, coord.bh};
}
