// Lists of the tiles that a mask leaves, made by one warp: which of an axis' tiles exist, and in which state.
#pragma once
#include "sm90/pipeline.cuh"

struct TileList {
    int entry[224];  // index << 8 | states of the warp groups' rows, two bits each
};

// Appends the next of `tiles` tiles that exist; returns how many and advances `next`. `seen` is the union of their
// states.
//
// states_of(index, count) gives the states of tiles index ... index + count - 1 together, 0 if all are EMPTY. The warp
// asks for 32 tiles at a time, after 32 groups of 32 where a query may span so many. only_first: stop at the first
// tiles found, where the pipeline is still empty.
template <typename List, typename States>
DEVICE int fill(List& list, int& next, int tiles, unsigned& seen, States states_of, bool only_first = false) {
    constexpr int CAPACITY = sizeof(list.entry) / sizeof(int);
    const int lane = threadIdx.x % 32;
    int count = 0;
    seen = 0;
    __syncwarp();
#pragma unroll 1
    while (next < tiles && count + 32 <= CAPACITY && !(only_first && count > 0)) {
        if (HAS_MASK && !MASK_READS_ARRAYS && tiles - next > 32) {
            const int first = next + 32 * lane, many = tiles - first < 32 ? tiles - first : 32;
            const unsigned groups = __ballot_sync(~0u, many > 0 && states_of(first, many) != 0);
            if (groups == 0) {
                next += 1024;
                continue;
            }
            next += 32 * (__ffs(groups) - 1);
        }
        const int index = next + lane;
        const unsigned states = index < tiles ? states_of(index, 1) : 0, live = __ballot_sync(~0u, states != 0);
        if (states != 0) list.entry[count + __popc(live & ((1u << lane) - 1))] = index << 8 | states;
        seen |= __reduce_or_sync(~0u, states);
        count += __popc(live);
        next += 32;
    }
    __syncwarp();
    return count;
}
