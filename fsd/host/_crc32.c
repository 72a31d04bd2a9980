/* CRC-32 (the polynomial of zlib, gzip and Ethernet) by carry-less multiplication, where the processor has it.
 *
 * Bytes are a polynomial over two elements, the first bit the highest power, and the CRC is what is left of it modulo
 * P. What is 128 bits at the distance of n bits from the end may be replaced by its product with x^n mod P: two
 * multiplications of 64 bits each. So four registers run over the bytes 64 at a time, become one, and the 16 bytes
 * that are left of all have the CRC of the whole, which a table then finds.
 *
 * In this order of bits a product of 64 by 64 bits lies one bit too far down; the factors are shifted for that.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define P 0xEDB88320u /* bit 31 is x^0, bit 0 is x^31, x^32 is left out */

static uint32_t table[256];

static uint32_t times_x(uint32_t value)
{
    return value >> 1 ^ (value & 1 ? P : 0);
}

static uint32_t by_bytes(uint32_t crc, const unsigned char *data, size_t size)
{
    while (size--)
        crc = crc >> 8 ^ table[(crc ^ *data++) & 255];
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FAST __attribute__((target("pclmul,sse2")))

static __m128i over_64, over_16; /* what brings a register over as many bytes, the lower half's factor first */
static int have;

static uint64_t power(unsigned int n)
{
    uint32_t value = 1u << 31;

    while (n--)
        value = times_x(value);
    return (uint64_t)value << 1;
}

/* Of the 128 bits the lower half is the higher powers, 64 bits further from the end; both products are 96 bits long. */
static __m128i factors(unsigned int bytes)
{
    return _mm_set_epi64x((long long)power(8 * bytes - 32), (long long)power(8 * bytes + 32));
}

static void prepare(void)
{
    have = __builtin_cpu_supports("pclmul") != 0;
    over_64 = factors(64);
    over_16 = factors(16);
}

FAST static __m128i bring(__m128i value, __m128i over, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(value, over, 0x00), high = _mm_clmulepi64_si128(value, over, 0x11);

    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

FAST static __m128i load(const unsigned char *data)
{
    return _mm_loadu_si128((const __m128i *)data);
}

FAST static uint32_t folded(uint32_t crc, const unsigned char *data, size_t size)
{
    __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128((int)crc));
    __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
    unsigned char left[16];

    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
        a = bring(a, over_64, load(data));
        b = bring(b, over_64, load(data + 16));
        c = bring(c, over_64, load(data + 32));
        d = bring(d, over_64, load(data + 48));
    }
    a = bring(bring(bring(a, over_16, b), over_16, c), over_16, d);
    for (; size >= 16; data += 16, size -= 16)
        a = bring(a, over_16, load(data));
    _mm_storeu_si128((__m128i *)left, a);
    return by_bytes(by_bytes(0, left, sizeof(left)), data, size);
}

static uint32_t of(uint32_t crc, const unsigned char *data, size_t size)
{
    return size >= 64 ? folded(crc, data, size) : by_bytes(crc, data, size);
}
#else
static const int have = 0;

static void prepare(void) {}

static uint32_t of(uint32_t crc, const unsigned char *data, size_t size)
{
    return by_bytes(crc, data, size);
}
#endif

/* Under the interpreter's lock: a megabyte takes less than it costs to get that again. */
static PyObject *crc32(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Py_buffer data;
    unsigned long before = 0;
    uint32_t crc;

    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "crc32 takes data and the CRC of what is before it");
        return NULL;
    }
    if (count == 2) {
        before = PyLong_AsUnsignedLongMask(args[1]);
        if (before == (unsigned long)-1 && PyErr_Occurred())
            return NULL;
    }
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0)
        return NULL;
    crc = ~of(~(uint32_t)before, data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef methods[] = {
    {"crc32", (PyCFunction)(void (*)(void))crc32, METH_FASTCALL,
     "crc32(data, before=0): as zlib's; `before` is the CRC of what comes before the data."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_crc32", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__crc32(void)
{
    PyObject *made = PyModule_Create(&module);
    uint32_t value;
    int byte, bit;

    for (byte = 0; byte < 256; byte++) {
        value = (uint32_t)byte;
        for (bit = 0; bit < 8; bit++)
            value = times_x(value);
        table[byte] = value;
    }
    prepare();
    if (made && PyModule_AddObject(made, "FAST", PyBool_FromLong(have)) < 0)
        Py_CLEAR(made);
    return made;
}
