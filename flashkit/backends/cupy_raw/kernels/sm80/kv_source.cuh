// KvSource: K and V of one key/value head. The only code of the forward pass that knows where they lie.
#pragma once

// Keys in pages: where each run of PAGE_RUN rows of some tiles lies, in elements from row 0 of page 0. Each copy of 16
// bytes would look its page up otherwise. A tile is looked up one step before its copies are issued, in one of
// LOOKED_UP slots: copies read the slots of two other tiles at most.
constexpr int RUNS = BLOCK_K / PAGE_RUN, LOOK_UPS = (RUNS + THREADS - 1) / THREADS;
struct TileRows {
    long long k[RUNS], v[RUNS];
};

struct KvSource {
    using CopyK = TileCopy<BLOCK_K, HEAD_DIM, THREADS, KeyRows>;
    using CopyV = TileCopy<BLOCK_K, HEAD_DIM_V, THREADS, KeyRows>;
    // What the page table says of a thread's runs of a tile. It is used late, since it arrives late.
    struct Pages {
        long long entry[larger(LOOK_UPS, 1)];
    };
    const Params& p;
    KeyRows k, v;
    int b, n_k;

    __device__ __forceinline__ KvSource(const Params& p, int b, int head_kv, int n_k)
        : p(p), k(p, p.k, b, head_kv), v(p, p.v, b, head_kv), b(b), n_k(n_k) {}

    // The tile with this number is the i-th that the mask leaves.
    __device__ __forceinline__ void load_k(int tile, int i, unsigned stage) const {
        CopyK::load(k, tile * BLOCK_K, n_k, stage, rows(i).k);
    }
    __device__ __forceinline__ void load_v(int tile, int i, unsigned stage) const {
        CopyV::load(v, tile * BLOCK_K, n_k, stage + AT_STAGE_V, rows(i).v);
    }

    // Where the runs of the i-th tile lie.
    static __device__ __forceinline__ TileRows& rows(int i) {
        return reinterpret_cast<TileRows*>(shared + AT_TILE_ROWS)[IS_PAGED ? i % larger(LOOKED_UP, 1) : 0];
    }
    __device__ __forceinline__ Pages look_up(int tile) const {
        Pages found;
        UNROLL(j, LOOK_UPS) {
            if (exists(j)) found.entry[j] = table_entry(p, b, page_number(p, key(tile, j)));
        }
        return found;
    }
    __device__ __forceinline__ void keep(const Pages& found, int tile, int i) const {
        UNROLL(j, LOOK_UPS) {
            if (!exists(j)) break;
            const int run = threadIdx.x + j * THREADS;
            const unsigned n = key(tile, j), slot = n - page_number(p, n) * (unsigned)p.page;
            const long long page = existing_page(p, found.entry[j]);
            rows(i).k[run] = page * p.k.batch + slot * p.k.token;
            rows(i).v[run] = page * p.v.batch + slot * p.v.token;
        }
    }

private:
    static __device__ __forceinline__ bool exists(int j) {
        return RUNS % THREADS == 0 || threadIdx.x + j * THREADS < RUNS;
    }
    // First key of the thread's j-th run. Past the last one it is the last one: the table may end there.
    __device__ __forceinline__ unsigned key(int tile, int j) const {
        const int n = tile * BLOCK_K + (threadIdx.x + j * THREADS) * PAGE_RUN;
        return n < n_k ? n : n_k - 1;
    }
};
