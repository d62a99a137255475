// Measured bandwidth: kernels that only read. A kernel writes its checksum so that the compiler cannot drop the loads.

struct Params {
    const uint4* x;               // memory to read
    long long vectors, repeats;   // 16-byte vectors of x, and how often they are read
    unsigned* checksum;
};

constexpr int UNROLL = 8;

static __device__ __forceinline__ void store_checksum(unsigned value, unsigned* checksum) {
    if (value == 0x9e3779b9u) *checksum = value;  // almost never true, so the store costs nothing
}

// All blocks together read x. Neighbouring threads read neighbouring vectors, each thread UNROLL of them at a time.
extern "C" __global__ void __launch_bounds__(512) read_global(const Params p) {
    unsigned found = 0;
    const long long step = (long long)gridDim.x * blockDim.x * UNROLL;
    for (long long r = 0; r < p.repeats; ++r)
        for (long long at = (long long)blockIdx.x * blockDim.x * UNROLL + threadIdx.x; at < p.vectors; at += step) {
            uint4 x[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                const long long vector = at + (long long)i * blockDim.x;
                // .cg bypasses L1, which would serve repeated reads.
                if (vector < p.vectors)
                    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w) : "l"(p.x + vector));
                else
                    x[i] = uint4{0, 0, 0, 0};
            }
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) found ^= x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
        }
    store_checksum(found, p.checksum);
}

// Each block reads its shared memory, repeats times UNROLL vectors a thread; a warp reads 512 consecutive bytes.
extern "C" __global__ void __launch_bounds__(1024) read_shared(const Params p) {
    __shared__ uint4 memory[2048];
    for (int i = threadIdx.x; i < 2048; i += blockDim.x) memory[i] = uint4{(unsigned)i, 0, 0, 0};
    __syncthreads();
    unsigned found = 0;
    const unsigned base = (unsigned)__cvta_generic_to_shared(memory);
    for (long long r = 0; r < p.repeats; ++r) {
        const unsigned at = base + 16 * ((threadIdx.x + 32 * (unsigned)r) % 1024);
        uint4 x[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w) : "r"(at + 16 * 128 * i));
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) found ^= x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
    }
    store_checksum(found, p.checksum);
}
