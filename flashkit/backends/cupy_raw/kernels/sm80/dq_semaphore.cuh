// Sums of dQ in global memory (sm80_backward.cu), to which blocks add one after the other.
#pragma once

DEVICE unsigned* done_of(const Params& p, int b, int h, int tile) { return row_at<unsigned>(p.dq_semaphore, b, h, tile); }
DEVICE void set_nothing(unsigned* word, int tile) {  // for a tile that nothing is added to
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(word + tile / 32), "r"(1u << tile % 32) : "memory");
}
DEVICE void set_done(unsigned* word, int tile) {  // what the block's threads have added before a barrier is there then
    asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(word + tile / 32), "r"(1u << tile % 32) : "memory");
}
DEVICE unsigned get_done(const unsigned* word) {
    unsigned x;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}
// Bits of word number `word` that tiles low ... high - 1 have.
DEVICE unsigned bits_of(int low, int high, int word) {
    const auto below = [&](int tile) { return tile >= 32 * word + 32 ? ~0u : tile <= 32 * word ? 0u : (1u << tile % 32) - 1; };
    return below(high) & ~below(low);
}
// Until tiles low ... high - 1 have their bits set; `seen`: the lane's first word, from a while ago. What comes next acts
// where memory is and after a branch, so later than what the bits stand for, without an acquiring load.
DEVICE void wait_for(const unsigned* done, unsigned seen, int low, int high) {
    for (int word = low / 32 + threadIdx.x % 32; 32 * word < high; word += 32) {
        const unsigned need = bits_of(low, high, word);
        while ((seen & need) != need) seen = get_done(done + word);
        seen = 0;
    }
    __syncwarp();
}

DEVICE void add(float* target, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3]) : "memory");
#else
#pragma unroll
    for (int e = 0; e < 4; ++e)
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target + e), "f"(x[e]) : "memory");
#endif
}
