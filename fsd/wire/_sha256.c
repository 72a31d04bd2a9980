/* SHA-256 of several messages of one length at once, where the processor has instructions for it.
 *
 * One message is one chain: each round waits for the one before, and the unit that makes them is idle for a good part
 * of the time. Two messages side by side fill it. Where vectors of eight words have rotations and any function of
 * three bits (AVX-512 on 256 bits), eight messages are faster still on Intel's processors: a lane each.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MOST 64 /* messages in one call */
#define BLOCK 64

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define PAIR __attribute__((target("sha,sse4.1,ssse3")))
#define WIDE __attribute__((target("avx512f,avx512vl,avx2")))
#define LANES 8
#define INLINE static inline __attribute__((always_inline))

static const uint32_t K[64] __attribute__((aligned(64))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static const uint32_t START[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static int pairs, wide; /* what this processor has */

static void look(void)
{
    unsigned int a, b, c, d;

    pairs = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1) && __builtin_cpu_supports("sse4.1") &&
            __builtin_cpu_supports("ssse3");
    wide = pairs && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx2") && __builtin_cpu_is("intel");
}

/* One or two messages by the processor's own rounds: `state` is words 0 1 4 5 and 2 3 6 7, the highest first. */
INLINE PAIR void rounds(__m128i state[][2], const unsigned char **data, size_t blocks, const int count)
{
    const __m128i order = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i a[2], c[2], w[2][4], next, sum;
    int lane, at, step;

    while (blocks--) {
        for (lane = 0; lane < count; lane++) {
            a[lane] = state[lane][0];
            c[lane] = state[lane][1];
            for (at = 0; at < 4; at++)
                w[lane][at] =
                    _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data[lane] + 16 * at)), order);
            data[lane] += BLOCK;
        }
#pragma GCC unroll 16
        for (step = 0; step < 16; step++) {
#pragma GCC unroll 2
            for (lane = 0; lane < count; lane++) {
                sum = _mm_add_epi32(w[lane][step & 3], _mm_load_si128((const __m128i *)(K + 4 * step)));
                c[lane] = _mm_sha256rnds2_epu32(c[lane], a[lane], sum);
                a[lane] = _mm_sha256rnds2_epu32(a[lane], c[lane], _mm_shuffle_epi32(sum, 0x0e));
            }
#pragma GCC unroll 2
            for (lane = 0; step < 12 && lane < count; lane++) {
                next = _mm_sha256msg1_epu32(w[lane][step & 3], w[lane][(step + 1) & 3]);
                next = _mm_add_epi32(next, _mm_alignr_epi8(w[lane][(step + 3) & 3], w[lane][(step + 2) & 3], 4));
                w[lane][step & 3] = _mm_sha256msg2_epu32(next, w[lane][(step + 3) & 3]);
            }
        }
        for (lane = 0; lane < count; lane++) {
            state[lane][0] = _mm_add_epi32(state[lane][0], a[lane]);
            state[lane][1] = _mm_add_epi32(state[lane][1], c[lane]);
        }
    }
}

PAIR static void one(__m128i state[][2], const unsigned char **data, size_t blocks)
{
    rounds(state, data, blocks, 1);
}

PAIR static void two(__m128i state[][2], const unsigned char **data, size_t blocks)
{
    rounds(state, data, blocks, 2);
}

/* What follows the last whole block: the rest, a bit, zeros and the length in bits; one block or two. */
static size_t ending(unsigned char *room, const unsigned char *data, size_t size)
{
    size_t rest = size % BLOCK, whole = rest + 9 <= BLOCK ? BLOCK : 2 * BLOCK, at;

    memset(room, 0, 2 * BLOCK);
    memcpy(room, data + size - rest, rest);
    room[rest] = 0x80;
    for (at = 0; at < 8; at++)
        room[whole - 1 - at] = (unsigned char)((uint64_t)size * 8 >> 8 * at);
    return whole / BLOCK;
}

static void store(unsigned char *digest, uint32_t word, int at)
{
    digest[4 * at] = (unsigned char)(word >> 24);
    digest[4 * at + 1] = (unsigned char)(word >> 16);
    digest[4 * at + 2] = (unsigned char)(word >> 8);
    digest[4 * at + 3] = (unsigned char)word;
}

PAIR static void by_pairs(const unsigned char **data, size_t size, unsigned char (*digests)[32], int count)
{
    static const int place[8] = {3, 2, 7, 6, 1, 0, 5, 4}; /* of each word in a state */
    unsigned char ends[2][2 * BLOCK];
    const unsigned char *at[2], *last[2];
    __m128i state[2][2];
    uint32_t words[8];
    size_t blocks = 0;
    int lane, word;

    for (word = 0; word < 8; word++)
        words[place[word]] = START[word];
    for (lane = 0; lane < count; lane++) {
        state[lane][0] = _mm_loadu_si128((const __m128i *)words);
        state[lane][1] = _mm_loadu_si128((const __m128i *)(words + 4));
        at[lane] = data[lane];
        last[lane] = ends[lane];
        blocks = ending(ends[lane], data[lane], size);
    }
    (count == 2 ? two : one)(state, at, size / BLOCK);
    (count == 2 ? two : one)(state, last, blocks);
    for (lane = 0; lane < count; lane++) {
        _mm_storeu_si128((__m128i *)words, state[lane][0]);
        _mm_storeu_si128((__m128i *)(words + 4), state[lane][1]);
        for (word = 0; word < 8; word++)
            store(digests[lane], words[place[word]], word);
    }
}

#define ADD _mm256_add_epi32
#define TURN _mm256_ror_epi32
#define XOR3(a, b, c) _mm256_ternarylogic_epi32(a, b, c, 0x96)

/* Rows become columns: word i of eight messages in vector i. */
INLINE WIDE void transpose(__m256i row[8])
{
    __m256i two[8], four[8];
    int at;

    for (at = 0; at < 8; at += 2) {
        two[at] = _mm256_unpacklo_epi32(row[at], row[at + 1]);
        two[at + 1] = _mm256_unpackhi_epi32(row[at], row[at + 1]);
    }
    for (at = 0; at < 8; at += 4) {
        four[at] = _mm256_unpacklo_epi64(two[at], two[at + 2]);
        four[at + 1] = _mm256_unpackhi_epi64(two[at], two[at + 2]);
        four[at + 2] = _mm256_unpacklo_epi64(two[at + 1], two[at + 3]);
        four[at + 3] = _mm256_unpackhi_epi64(two[at + 1], two[at + 3]);
    }
    for (at = 0; at < 4; at++) {
        row[at] = _mm256_permute2x128_si256(four[at], four[at + 4], 0x20);
        row[at + 4] = _mm256_permute2x128_si256(four[at], four[at + 4], 0x31);
    }
}

WIDE static void eight(__m256i state[8], const unsigned char **data, size_t blocks)
{
    const __m256i order = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL));
    __m256i w[16], v[8], t, u;
    size_t block;
    int at, half, r;

    for (block = 0; block < blocks; block++) {
        for (half = 0; half < 16; half += 8) {
            for (at = 0; at < 8; at++)
                w[half + at] = _mm256_shuffle_epi8(
                    _mm256_loadu_si256((const __m256i *)(data[at] + BLOCK * block + 4 * (size_t)half)), order);
            transpose(w + half);
        }
        memcpy(v, state, sizeof v);
#pragma GCC unroll 64
        for (r = 0; r < 64; r++) { /* v[(i - r) & 7] is the i-th of the eight words */
            __m256i a = v[-r & 7], e = v[(4 - r) & 7];

            if (r >= 16) {
                t = w[(r + 1) & 15];
                u = w[(r + 14) & 15];
                t = XOR3(TURN(t, 7), TURN(t, 18), _mm256_srli_epi32(t, 3));
                u = XOR3(TURN(u, 17), TURN(u, 19), _mm256_srli_epi32(u, 10));
                w[r & 15] = ADD(ADD(w[r & 15], t), ADD(w[(r + 9) & 15], u));
            }
            t = ADD(v[(7 - r) & 7], ADD(w[r & 15], _mm256_set1_epi32((int)K[r])));
            t = ADD(t, XOR3(TURN(e, 6), TURN(e, 11), TURN(e, 25)));
            t = ADD(t, _mm256_ternarylogic_epi32(e, v[(5 - r) & 7], v[(6 - r) & 7], 0xca)); /* choose */
            u = ADD(XOR3(TURN(a, 2), TURN(a, 13), TURN(a, 22)),
                    _mm256_ternarylogic_epi32(a, v[(1 - r) & 7], v[(2 - r) & 7], 0xe8)); /* majority */
            v[(3 - r) & 7] = ADD(v[(3 - r) & 7], t);
            v[(7 - r) & 7] = ADD(t, u);
        }
        for (at = 0; at < 8; at++)
            state[at] = ADD(state[at], v[at]);
    }
}

WIDE static void by_eight(const unsigned char **data, size_t size, unsigned char (*digests)[32])
{
    unsigned char ends[LANES][2 * BLOCK];
    const unsigned char *last[LANES];
    __m256i state[8];
    uint32_t words[8];
    size_t blocks = 0;
    int lane, word;

    for (word = 0; word < 8; word++)
        state[word] = _mm256_set1_epi32((int)START[word]);
    for (lane = 0; lane < LANES; lane++) {
        last[lane] = ends[lane];
        blocks = ending(ends[lane], data[lane], size);
    }
    eight(state, data, size / BLOCK);
    eight(state, last, blocks);
    for (word = 0; word < 8; word++) {
        _mm256_storeu_si256((__m256i *)words, state[word]);
        for (lane = 0; lane < LANES; lane++)
            store(digests[lane], words[lane], word);
    }
}

static void of_all(const unsigned char **data, size_t size, unsigned char (*digests)[32], int count)
{
    int at = 0;

    for (; wide && count - at >= LANES; at += LANES)
        by_eight(data + at, size, digests + at);
    for (; at < count; at += 2)
        by_pairs(data + at, size, digests + at, count - at > 1 ? 2 : 1);
}
#else
static const int pairs = 0;

static void look(void) {}

static void of_all(const unsigned char **data, size_t size, unsigned char (*digests)[32], int count) {}
#endif

static PyObject *many(PyObject *self, PyObject *given)
{
    Py_buffer views[MOST];
    const unsigned char *data[MOST];
    unsigned char digests[MOST][32];
    PyObject *made = NULL, *pieces = PySequence_Fast(given, "a sequence of bytes"), *digest;
    Py_ssize_t count = pieces ? PySequence_Fast_GET_SIZE(pieces) : 0, have = 0, at;

    if (!pieces)
        return NULL;
    if (!pairs || count < 1 || count > MOST) {
        PyErr_SetString(PyExc_ValueError, "1 to 64 messages, on a processor that can");
        goto end;
    }
    for (; have < count; have++) {
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(pieces, have), &views[have], PyBUF_SIMPLE) < 0)
            goto end;
        data[have] = views[have].buf;
        if (views[have].len != views[0].len) {
            have++;
            PyErr_SetString(PyExc_ValueError, "messages of different lengths");
            goto end;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    of_all(data, (size_t)views[0].len, digests, (int)count);
    Py_END_ALLOW_THREADS
    made = PyList_New(count);
    for (at = 0; made && at < count; at++) {
        digest = PyBytes_FromStringAndSize((const char *)digests[at], 32);
        if (!digest)
            Py_CLEAR(made);
        else
            PyList_SET_ITEM(made, at, digest);
    }
end:
    while (have)
        PyBuffer_Release(&views[--have]);
    Py_DECREF(pieces);
    return made;
}

static PyMethodDef methods[] = {
    {"many", many, METH_O, "The digests of 1 to 64 messages of one length. Raises ValueError."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sha256", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sha256(void)
{
    PyObject *made = PyModule_Create(&module);

    look();
    if (made && PyModule_AddObject(made, "FAST", PyBool_FromLong(pairs)) < 0)
        Py_CLEAR(made);
    return made;
}
