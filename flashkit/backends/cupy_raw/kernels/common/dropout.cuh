// Dropout of P and dP by a counter-based generator (flashkit/mods/dropout.py): the forward and the backward pass
// compute the same bits from (seed, batch entry, head, row, key).
#pragma once

struct Words { unsigned word[4]; };

// Philox-4x32-10: four words, for keys 4 * key_group ... 4 * key_group + 3 of a row.
DEVICE Words philox(unsigned long long seed, long long key_group, long long row, long long h, long long b) {
    unsigned c0 = (unsigned)key_group, c1 = (unsigned)row, c2 = (unsigned)h, c3 = (unsigned)b;
    unsigned key0 = (unsigned)seed, key1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ key0, c1 = low1, c2 = high0 ^ c3 ^ key1, c3 = low0;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// An element of P or dP, dropped or scaled.
DEVICE fk_float drop(fk_float x, const Params& p, long long b, long long h, long long row, long long key) {
    const Words words = philox(p.seed, key >> 2, row, h, b);
    const unsigned(&w)[4] = words.word;
    const int lane = key & 3;
    const unsigned word = lane == 0 ? w[0] : lane == 1 ? w[1] : lane == 2 ? w[2] : w[3];
    return word >= (unsigned)p.dropout_threshold ? x * (fk_float)p.dropout_scale : (fk_float)0;
}

// Two neighbouring elements of a fragment, keys key and key + 1 of a row. key is even, so one call of Philox serves
// both.
DEVICE void drop_pair(float& x0, float& x1, const Params& p, int b, int h, int row, int key) {
    const Words words = philox(p.seed, key >> 2, row, h, b);
    const bool upper = key & 2;
    const unsigned word0 = upper ? words.word[2] : words.word[0], word1 = upper ? words.word[3] : words.word[1];
    x0 = word0 >= (unsigned)p.dropout_threshold ? x0 * (float)p.dropout_scale : 0;
    x1 = word1 >= (unsigned)p.dropout_threshold ? x1 * (float)p.dropout_scale : 0;
}
