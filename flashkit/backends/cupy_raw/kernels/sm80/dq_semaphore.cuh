// The order in which CTAs add to dq_accum. p.dq_semaphore has a bit for each pair of a query tile and a key tile: the
// CTA of the key tile has added to the query tile.
#pragma once

DEVICE unsigned* semaphore_at(const Params& p, int b, int h, int tile) {
    return row_at<unsigned>(p.dq_semaphore, b, h, q_tile_number(p, b, tile, BLOCK_Q));
}
DEVICE void semaphore_skip(unsigned* word, int tile) {  // for a tile that gets no addition
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(word + tile / 32), "r"(1u << tile % 32) : "memory");
}
DEVICE void semaphore_release(unsigned* word, int tile) {  // orders the CTA's additions before the last barrier
    asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(word + tile / 32), "r"(1u << tile % 32) : "memory");
}
DEVICE unsigned semaphore_load(const unsigned* word) {
    unsigned x;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}
// The bits of tiles low ... high - 1 in word number `word`.
DEVICE unsigned bits_between(int low, int high, int word) {
    const auto below = [&](int tile) {
        return tile >= 32 * word + 32 ? ~0u : tile <= 32 * word ? 0u : (1u << tile % 32) - 1;
    };
    return below(high) & ~below(low);
}
// Waits until tiles low ... high - 1 have their bits set; `bits`: the lane's first word, loaded a while ago. A relaxed
// load suffices: the additions that follow are performed at the L2 cache and depend on a branch on it, so they come
// after the additions that the bits stand for.
DEVICE void semaphore_wait(const unsigned* semaphore, unsigned bits, int low, int high) {
    for (int word = low / 32 + threadIdx.x % 32; 32 * word < high; word += 32) {
        const unsigned need = bits_between(low, high, word);
        while ((bits & need) != need) bits = semaphore_load(semaphore + word);
        bits = 0;
    }
    __syncwarp();
}

DEVICE void reduce_add(float* target, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3]) : "memory");
#else
    UNROLL(e, 4)
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target + e), "f"(x[e]) : "memory");
#endif
}
