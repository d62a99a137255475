// Which key tile a CTA of the backward pass takes.
#pragma once

// Backward pass: work tiles are key tiles, taken from an atomic counter in the order in which CTAs add to dQ. A CTA
// therefore only ever waits for a CTA that is resident. The last key tiles come first, and a CTA starts with its first
// query tile: under a causal mask that is its diagonal, where it is the first to add. The last group of heads runs in
// the reverse order, longest first, so that all CTAs end at about the same time.
struct BackwardTileScheduler {
    int tiles_k, heads;
    bool descending;

    __device__ __forceinline__ TileCoord initial(const Params& p, unsigned* broadcast) {
        if (ORDERED) {
            if (threadIdx.x == 0) *broadcast = atomicAdd(p.tile_counter, 1u);
            __syncthreads();
        }
        const unsigned index = ORDERED ? *broadcast : blockIdx.x;
        heads = (int)p.heads / GQA_GROUP;
        tiles_k = (int)num_k_tiles(p, BLOCK_K);
        const int all = heads * (int)num_entries(p), group = (int)p.heads_per_l2_group;
        const TileCoord coord = tile_coord((int)index, tiles_k, all, group);
        descending = HAS_MASK && all > group && coord.bh >= (all - 1) / group * group;
        return {descending ? coord.tile : tiles_k - 1 - coord.tile, coord.bh};
    }
};
