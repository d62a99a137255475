// Results from registers to global memory.
#pragma once

// Stores two neighbouring elements of a row of DIM; skips elements past its end.
template <int DIM>
DEVICE void store_pair(storage* row, int column, float x, float y) {
    if (DIM != padded(DIM) && column + 1 >= DIM) {
        if (column < DIM) row[column] = narrow(x);
    } else if constexpr (IS_FLOAT32) {
        row[column] = narrow(x), row[column + 1] = narrow(y);
    } else {
        const unsigned both = pack(x, y);
        if (((unsigned long long)(row + column) & 3) == 0) {
            *reinterpret_cast<unsigned*>(row + column) = both;
        } else {
            reinterpret_cast<unsigned short*>(row)[column] = (unsigned short)both;
            reinterpret_cast<unsigned short*>(row)[column + 1] = (unsigned short)(both >> 16);
        }
    }
}

// Stores eight neighbouring elements of a row of DIM, from a column that is a multiple of eight.
template <int DIM>
DEVICE void store_eight(storage* row, int column, const float (&x)[8]) {
    if (DIM % 8 == 0 && ((unsigned long long)row & 15) == 0) {
        if (DIM != padded(DIM) && column >= DIM) return;
        if constexpr (IS_FLOAT32) {
            reinterpret_cast<float4*>(row + column)[0] = float4{x[0], x[1], x[2], x[3]};
            reinterpret_cast<float4*>(row + column)[1] = float4{x[4], x[5], x[6], x[7]};
        } else {
            *reinterpret_cast<uint4*>(row + column) =
                uint4{pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
        }
    } else {
#pragma unroll
        for (int c = 0; c < 8; c += 2) store_pair<DIM>(row, column + c, x[c], x[c + 1]);
    }
}

// Stores a warp's accumulator of 16 TILES rows and 8 N columns, from `column` on, in vectors of 16 bytes: rows row ...
// of `target`, without rows at or past `count`. The accumulator passes through shared memory, rows of the warp's own in
// the layout of STAGED columns, from column `first` there on.
template <int DIM, int STAGED, int PACK_GQA, int TILES, int N>
DEVICE void store_tile(const float (&x)[TILES][N][4], float factor, unsigned char* staging, int first, int column,
                       const Rows<PACK_GQA>& target, int row, int count) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    UNROLL(i, TILES)
        UNROLL(half, 2)
            UNROLL(n, N) {
                void* at = &element<STAGED>(staging, 16 * i + 8 * half + lane / 4, first + 8 * n + lane % 4 * 2);
                const float a = x[i][n][2 * half] * factor, b = x[i][n][2 * half + 1] * factor;
                if constexpr (IS_FLOAT32) *static_cast<float2*>(at) = float2{a, b};
                else *static_cast<unsigned*>(at) = pack(a, b);
            }
    __syncwarp();
    if (DIM % VEC_ELEMENTS != 0 || !target.aligned) {
#pragma unroll 1
        for (int i = lane; i < 16 * TILES * N * 8; i += 32) {
            const int r = i / (N * 8), d = i % (N * 8);
            if (row + r < count && column + d < DIM)
                target.at(row + r)[column + d] = element<STAGED>(staging, r, first + d);
        }
        return;
    }
    // Neighbouring lanes store neighbouring vectors of a row, then of the rows below.
    constexpr int ROW_VECS = N * 8 / VEC_ELEMENTS, ACROSS = ROW_VECS < 32 ? ROW_VECS : 32, DOWN = 32 / ACROSS;
    const int below = lane / ACROSS;
#pragma unroll
    for (int across = 0; across < ROW_VECS; across += ACROSS) {
        const int d = (across + lane % ACROSS) * VEC_ELEMENTS;
        if (below >= DOWN || d >= N * 8 || column + d >= DIM) continue;
#pragma unroll
        for (int r = 0; r < 16 * TILES; r += DOWN) {
            if (row + below + r >= count || below + r >= 16 * TILES) break;
            *reinterpret_cast<uint4*>(target.at(row + below + r) + column + d) =
                *reinterpret_cast<const uint4*>(&element<STAGED>(staging, below + r, first + d));
        }
    }
}
