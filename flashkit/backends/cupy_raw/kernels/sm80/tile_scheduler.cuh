// Which work blocks take, and which tiles there are.
#pragma once

// Tiles along one axis that are not EMPTY, in shared memory: the registers of the loops over them are needed for sums.
// The first warp classifies 32 tiles at once, and before that 32 groups of 32 where one look may cover so many.
struct TileList {
    static constexpr int MOST = 510;
    int entry[MOST];  // 2 * tile + (state == FULL)
    int count, next;  // entries; the first tile, in the order of going, that nobody has looked at
};

// Fill the list with the next tiles of first ... last - 1 (down: the last first); false if none is left. For all
// threads of a block. HEADS: heads h ... that share the tile. from ... to - 1: the range on the other axis.
template <int BLOCK, bool ALONG_KEYS, int HEADS>
DEVICE bool fill(TileList& list, const Params& p, int b, int h, int from, int to, int first, int last, int n,
                 bool down = false) {
    __syncthreads();
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x, tiles = last - first;
        const long long offset = offset_of(p, b);
        auto look = [&](int place, int many) {  // tiles at places `place` ... `place` + many - 1 of the way
            if (place >= tiles) return (int)EMPTY;
            const int end_place = place + many < tiles ? place + many : tiles;
            const int low = down ? last - end_place : first + place, high = down ? last - place : first + end_place;
            const int start = low * BLOCK, end = high * BLOCK < n ? high * BLOCK : n;
            int state = ALONG_KEYS ? tile_state(p, b, h, offset, from, to, start, end)
                                   : tile_state(p, b, h, offset, start, end, from, to);
#pragma unroll 1
            for (int other = 1; other < HEADS; ++other) {
                const int found = ALONG_KEYS ? tile_state(p, b, h + other, offset, from, to, start, end)
                                             : tile_state(p, b, h + other, offset, start, end, from, to);
                state = state == found ? state : (int)PARTIAL;
            }
            return state;
        };
        int count = 0, place = list.next;
        while (place < tiles && count + 32 <= TileList::MOST) {
            if (HAS_MASK && !MASK_READS_ARRAYS && tiles - place > 32) {
                const unsigned groups = __ballot_sync(~0u, look(place + 32 * lane, 32) != EMPTY);
                if (groups == 0) {
                    place += 1024;
                    continue;
                }
                place += 32 * (__ffs(groups) - 1);
            }
            const int state = look(place + lane, 1);
            const unsigned live = __ballot_sync(~0u, state != EMPTY);
            const int tile = down ? last - 1 - place - lane : first + place + lane;
            if (state != EMPTY) list.entry[count + __popc(live & ((1u << lane) - 1))] = 2 * tile + (state == FULL);
            count += __popc(live);
            place += 32;
        }
        __syncwarp();  // all lanes have read list.next
        if (lane == 0) list.count = count, list.next = place;
    }
    __syncthreads();
    return list.count > 0;
}

// Which work is number `index`: heads in groups of `most`, and within a group all heads' first tile, then their second.
struct Work {
    int tile, bh;
};
DEVICE Work work_of(unsigned index, unsigned tiles, unsigned heads, unsigned most) {
    const unsigned group = index / (most * tiles), rest = index - group * most * tiles;
    const unsigned size = heads - group * most < most ? heads - group * most : most;
    return {(int)(rest / size), (int)(group * most + rest % size)};
}
