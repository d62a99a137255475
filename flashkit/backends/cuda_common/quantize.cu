// `flashkit.quantize` of 16-bit arrays to codes of e4m3 with a scale for each block of 128 tokens of a head, in one
// pass.
//
// A CTA takes a block. A lane has 16 columns of a row, in registers from the load to the codes: the Hadamard transform
// (DIM is a power of two) takes sums of them and, in its last stages, those of other lanes. V^T is made from the codes
// in shared memory: a thread permutes the bytes of 32 keys and four columns.
//
// Constants of the head: DIM, 64, 128 or 256; IS_BFLOAT16.

struct Strides { long long batch, head, token; };  // in elements; of the last axis 1

struct Arguments {
    const unsigned short* source;
    unsigned char* codes;
    float* scale;
    unsigned char* transposed;  // V^T (B, H, DIM, padded tokens), or null
    Strides of_source, of_codes, of_scale;  // of_scale.token: from block to block
    long long heads, tokens, padded, rotates;
    unsigned long long signs[4];  // a bit for each column: rows are multiplied by -1 there before the transform
};

constexpr int BLOCK = 128, THREADS = 256, COLUMNS = 16;  // tokens; of a lane
constexpr int LANES = DIM / COLUMNS;  // of a row
constexpr int DOWN = 32 / LANES, STEPS = BLOCK / (8 * DOWN);  // rows and steps of a warp
constexpr float LARGEST = 448, MIN_SCALE = 1.1754944e-38f;

static __device__ __forceinline__ float widen(unsigned bits) {
    if constexpr (IS_BFLOAT16) return __uint_as_float(bits << 16);
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
    return x;
}
static __device__ __forceinline__ bool is_number(float x) { return fabsf(x) < __int_as_float(0x7f800000); }

// x times the signs and the Hadamard matrix of the row, 1 / sqrt(DIM) of it.
static __device__ __forceinline__ void rotate(float (&x)[COLUMNS], unsigned signs, int lane) {
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) x[i] = __uint_as_float(__float_as_uint(x[i]) ^ (signs >> i & 1) << 31);
#pragma unroll
    for (int step = 1; step < COLUMNS; step *= 2)
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            if (i & step) continue;
            const float low = x[i], high = x[i + step];
            x[i] = low + high, x[i + step] = low - high;
        }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const float other = __shfl_xor_sync(~0u, x[i], step);
            x[i] = lane & step ? other - x[i] : x[i] + other;
        }
    const float factor = DIM == 64 ? 0.125f : DIM == 128 ? 0.08838834764831845f : 0.0625f;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) x[i] *= factor;
}

static __device__ __forceinline__ unsigned pack(float x0, float x1, float x2, float x3) {
    unsigned codes;
    asm("{ .reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high}; }" : "=r"(codes) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return codes;
}

// The power of two that is no less.
static __device__ __forceinline__ float power_of_two(float x) {
    return __uint_as_float((__float_as_uint(x) + 0x7fffff) & 0x7f800000);
}

// V^T of a block in shared memory: among 16 keys, key 8 j + 2 t + c to 4 t + 2 j + c.
static __device__ __forceinline__ void transpose(const unsigned (&tile)[BLOCK][DIM / 4], unsigned char* to,
                                                 long long padded, int keys) {
    const int word = threadIdx.x % (DIM / 4), first = threadIdx.x / (DIM / 4) * 32;
    if (first >= keys) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned line[4][4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned(*x)[DIM / 4] = tile + first + 16 * half + 2 * t;
            const unsigned a = x[0][word], b = x[1][word], c = x[8][word], d = x[9][word];
            const unsigned low = __byte_perm(a, b, 0x5140), high = __byte_perm(a, b, 0x7362);
            const unsigned low8 = __byte_perm(c, d, 0x5140), high8 = __byte_perm(c, d, 0x7362);
            line[0][t] = __byte_perm(low, low8, 0x5410), line[1][t] = __byte_perm(low, low8, 0x7632);
            line[2][t] = __byte_perm(high, high8, 0x5410), line[3][t] = __byte_perm(high, high8, 0x7632);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint4*>(to + (4 * word + i) * padded + first + 16 * half) =
                uint4{line[i][0], line[i][1], line[i][2], line[i][3]};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_blocks(const Arguments p) {
    __shared__ unsigned tile[BLOCK][DIM / 4];
    __shared__ float tops[8];
    const int blocks = (int)((p.tokens + BLOCK - 1) / BLOCK), block = blockIdx.x % blocks, bh = blockIdx.x / blocks;
    const int b = bh / (int)p.heads, h = bh % (int)p.heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = lane % LANES * COLUMNS, row0 = warp * STEPS * DOWN + lane / LANES;
    const long long token0 = (long long)block * BLOCK;
    const unsigned short* source = p.source + b * p.of_source.batch + h * p.of_source.head + column;
    float x[STEPS][COLUMNS], top = 0;
    uint4 loaded[STEPS][2];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const long long token = token0 + row0 + i * DOWN;
        const uint4* at = reinterpret_cast<const uint4*>(source + token * p.of_source.token);
        loaded[i][0] = loaded[i][1] = uint4{};
        if (token < p.tokens) loaded[i][0] = at[0], loaded[i][1] = at[1];
    }
    const unsigned signs = (unsigned)(p.signs[column / 64] >> column % 64) & 0xffff;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned words[4] = {loaded[i][half].x, loaded[i][half].y, loaded[i][half].z, loaded[i][half].w};
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const float value = widen(words[c / 2] >> c % 2 * 16 & 0xffff);
                x[i][8 * half + c] = is_number(value) ? value : __int_as_float(0x7fffffff);
            }
        }
        if (p.rotates) rotate(x[i], signs, lane);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) top = is_number(x[i][c]) ? fmaxf(top, fabsf(x[i][c])) : top;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    if (lane == 0) tops[warp] = top;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) top = fmaxf(top, tops[i]);
    const float scale = power_of_two(fmaxf(__fdiv_rn(top, LARGEST), MIN_SCALE));
    if (threadIdx.x == 0) p.scale[b * p.of_scale.batch + h * p.of_scale.head + block * p.of_scale.token] = scale;
    unsigned char* codes = p.codes + b * p.of_codes.batch + h * p.of_codes.head + column;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int row = row0 + i * DOWN;
        unsigned words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w)
            words[w] = pack(__fdiv_rn(x[i][4 * w], scale), __fdiv_rn(x[i][4 * w + 1], scale),
                            __fdiv_rn(x[i][4 * w + 2], scale), __fdiv_rn(x[i][4 * w + 3], scale));
        const uint4 vec{words[0], words[1], words[2], words[3]};
        const bool exists = token0 + row < p.tokens;
        if (exists) *reinterpret_cast<uint4*>(codes + (token0 + row) * p.of_codes.token) = vec;
        if (p.transposed != nullptr) *reinterpret_cast<uint4*>(&tile[row][column / 4]) = exists ? vec : uint4{};
    }
    if (p.transposed == nullptr) return;
    __syncthreads();
    const long long left = p.padded - token0;
    transpose(tile, p.transposed + bh * DIM * p.padded + token0, p.padded, left < BLOCK ? (int)left : BLOCK);
}
