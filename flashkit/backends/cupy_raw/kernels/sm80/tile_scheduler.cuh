// Which work tile a CTA takes, and which tiles of it the mask leaves.
#pragma once
#include "common/fragment.cuh"

// Tiles along one axis that are not EMPTY, in shared memory: the registers of the main loops are needed for
// accumulators. The first warp classifies 32 tiles at once, and before that 32 groups of 32 tiles where one call of
// classify() may cover them.
struct TileList {
    static constexpr int CAPACITY = 510;
    int entry[CAPACITY];  // 2 * tile + (state == FULL)
    int count, next;      // entries; the first step of the walk that is not classified yet
};

// Fills the list with the next tiles of first ... last - 1, backwards if `descending`; false if none is left. For all
// threads of a CTA. from ... to - 1: the range on the other axis. HEADS: heads h ... that share the tile.
template <int BLOCK, bool ALONG_KEYS, int HEADS>
DEVICE bool fill(TileList& list, const Params& p, int b, int h, int from, int to, int first, int last, int n,
                 bool descending = false) {
    __syncthreads();
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x, tiles = last - first;
        const long long q_position = seq_info(p, b).q_position;
        auto classify_steps = [&](int step, int steps) {  // the tiles of `steps` steps of the walk
            if (step >= tiles) return (int)EMPTY;
            const int end_step = step + steps < tiles ? step + steps : tiles;
            const int low = descending ? last - end_step : first + step;
            const int high = descending ? last - step : first + end_step;
            const int start = low * BLOCK, end = high * BLOCK < n ? high * BLOCK : n;
            int state = ALONG_KEYS ? tile_state(p, b, h, q_position, from, to, start, end)
                                   : tile_state(p, b, h, q_position, start, end, from, to);
#pragma unroll 1
            for (int other = 1; other < HEADS; ++other) {
                const int found = ALONG_KEYS ? tile_state(p, b, h + other, q_position, from, to, start, end)
                                             : tile_state(p, b, h + other, q_position, start, end, from, to);
                state = state == found ? state : (int)PARTIAL;
            }
            return state;
        };
        int count = 0, step = list.next;
        while (step < tiles && count + 32 <= TileList::CAPACITY) {
            if (HAS_MASK && !MASK_READS_ARRAYS && tiles - step > 32) {
                const unsigned groups = __ballot_sync(~0u, classify_steps(step + 32 * lane, 32) != EMPTY);
                if (groups == 0) {
                    step += 1024;
                    continue;
                }
                step += 32 * (__ffs(groups) - 1);
            }
            const int state = classify_steps(step + lane, 1);
            const unsigned live = __ballot_sync(~0u, state != EMPTY);
            const int tile = descending ? last - 1 - step - lane : first + step + lane;
            if (state != EMPTY) list.entry[count + __popc(live & ((1u << lane) - 1))] = 2 * tile + (state == FULL);
            count += __popc(live);
            step += 32;
        }
        __syncwarp();  // all lanes have read list.next
        if (lane == 0) list.count = count, list.next = step;
    }
    __syncthreads();
    return list.count > 0;
}

// Forward pass: the grid has a CTA for each work tile and split, so initial() gives the only work tile of a CTA. The
// last query tiles come first: under a causal mask they have most to do.
template <bool SPLIT>
struct ForwardTileScheduler {
    static __device__ __forceinline__ TileCoord initial(const Params& p, int heads, int tiles, int index) {
        const int all = heads * (int)num_entries(p), together = SPLIT ? all : (int)p.heads_per_l2_group;
        const TileCoord coord = tile_coord(index, tiles_before_lpt_tail(tiles), all, together);
        return {tiles - 1 - coord.tile, coord.bh};
    }
};
