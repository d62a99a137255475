// Bandwidths: loops that read, and nothing else. The sum that leaves a loop only keeps it from being optimised away.
//
// Arguments: address of the memory to read, 16-byte words of it, how often it is read, address for the sum.

struct Params {
    const uint4* x;
    long long words, repeats;
    unsigned* sum;
};

constexpr int UNROLL = 8;

static __device__ __forceinline__ void leave(unsigned found, unsigned* sum) {
    if (found == 0x9e3779b9u) *sum = found;  // as good as never
}

// All blocks together read x. Neighbouring threads read neighbouring words, each thread UNROLL of them at a time.
extern "C" __global__ void __launch_bounds__(512) read_global(const Params p) {
    unsigned found = 0;
    const long long step = (long long)gridDim.x * blockDim.x * UNROLL;
    for (long long r = 0; r < p.repeats; ++r)
        for (long long at = (long long)blockIdx.x * blockDim.x * UNROLL + threadIdx.x; at < p.words; at += step) {
            uint4 x[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                const long long word = at + (long long)i * blockDim.x;
                // L1 would answer for memory that is read again.
                if (word < p.words)
                    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w) : "l"(p.x + word));
                else
                    x[i] = uint4{0, 0, 0, 0};
            }
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) found ^= x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
        }
    leave(found, p.sum);
}

// Each block reads its shared memory, repeats times UNROLL words a thread; a warp reads 512 neighbouring bytes at a time.
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
    leave(found, p.sum);
}
