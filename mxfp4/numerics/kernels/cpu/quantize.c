/* Block quantization on the CPU: the same bytes as reference.py, its twin; built and called by quantize.py.

   LANES lines are worked on side by side: value[k][lane], k along the blocks. The rotation, the maxima, the rounding
   and the packing are then the same operation on LANES neighbours, which any compiler turns into vector instructions.
   Compile without contraction and without fast-math: every operation below is meant as it stands. */

#include <stdint.h>
#include <string.h>

enum { LANES = 16, BLOCK = 32, MAX_GROUP = 128 };
enum { OUT_CODES, OUT_FLOAT32, OUT_BFLOAT16 };

typedef struct {
    /* x: element (batch, line, k) at x + batch * batch_stride + line * line_stride + k * k_stride, in elements */
    const void *x;
    int64_t x_is_bfloat16, batches, lines, k, batch_stride, line_stride, k_stride;
    void *out;      /* codes, or values [batches, lines, k] */
    uint8_t *scale; /* [batches, lines (2D: lines / 32), k / 32], only with codes */
    int64_t out_kind, mbits, bias, emax, max_code, addend, two_d, hadamard, stochastic, prescaled;
    int64_t sign_kind; /* of the rotation: 0 no signs, 1 those in sign_words, 2 drawn from the seed */
    uint64_t seed;
    float hadamard_scale;
    uint32_t stream;
    uint32_t sign_words[4]; /* bit i % 32 of word i / 32: sign i is -1 */
} job;

static inline int32_t bits_of(float f) { int32_t b; memcpy(&b, &f, 4); return b; }
static inline float float_of(int32_t b) { float f; memcpy(&f, &b, 4); return f; }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLE 1
#endif
#endif

/* An 8 x 8 transpose between rows that lie `from_stride` and `to_stride` apart. */
static inline void transpose8(const float *from, int64_t from_stride, float *to, int64_t to_stride) {
#ifdef HAS_SHUFFLE
    typedef float v8 __attribute__((vector_size(32)));
    v8 a[8], b[8];
    for (int i = 0; i < 8; i++) memcpy(&a[i], from + i * from_stride, 32);
    for (int i = 0; i < 4; i++) {
        b[2 * i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        b[2 * i + 1] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int m = 0; m < 2; m++) {
            a[i + m] = __builtin_shufflevector(b[i + m], b[i + m + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[i + m + 2] = __builtin_shufflevector(b[i + m], b[i + m + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int m = 0; m < 4; m++) {
        b[m] = __builtin_shufflevector(a[m], a[m + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        b[m + 4] = __builtin_shufflevector(a[m], a[m + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 8; i++) memcpy(to + i * to_stride, &b[i], 32);
#else
    for (int i = 0; i < 8; i++)
        for (int m = 0; m < 8; m++) to[i * to_stride + m] = from[m * from_stride + i];
#endif
}

/* `n` lines and `group` values of each, zeros beyond the lines that there are. */
static void load(const job *j, int64_t batch, int64_t line, int n, int64_t k, int group, float (*restrict v)[LANES]) {
    const int64_t at = batch * j->batch_stride + line * j->line_stride + k * j->k_stride;
    if (n < LANES) memset(v, 0, sizeof(float) * LANES * group);
    if (j->x_is_bfloat16) {
        const uint16_t *x = (const uint16_t *)j->x + at;
        if (j->line_stride == 1 && n == LANES) {
            for (int i = 0; i < group; i++)
                for (int l = 0; l < LANES; l++) v[i][l] = float_of((int32_t)((uint32_t)x[i * j->k_stride + l] << 16));
        } else {
            for (int l = 0; l < n; l++)
                for (int i = 0; i < group; i++)
                    v[i][l] = float_of((int32_t)((uint32_t)x[l * j->line_stride + i * j->k_stride] << 16));
        }
    } else {
        const float *x = (const float *)j->x + at;
        if (j->line_stride == 1 && n == LANES) {
            for (int i = 0; i < group; i++)
                for (int l = 0; l < LANES; l++) v[i][l] = x[i * j->k_stride + l];
        } else if (j->k_stride == 1 && n == LANES) {
            for (int l = 0; l < LANES; l += 8)
                for (int i = 0; i < group; i += 8) transpose8(x + l * j->line_stride + i, j->line_stride, &v[i][l], LANES);
        } else {
            for (int l = 0; l < n; l++)
                for (int i = 0; i < group; i++) v[i][l] = x[l * j->line_stride + i * j->k_stride];
        }
    }
}

static void rotate(const job *j, const float *restrict signs, int group, float (*restrict v)[LANES]) {
    const int size = (int)j->hadamard;
    if (j->sign_kind)
        for (int i = 0; i < group; i++)
            for (int l = 0; l < LANES; l++) v[i][l] *= signs[i % size];
    for (int distance = 1; distance < size; distance *= 2)
        for (int i = 0; i < group; i += 2 * distance)
            for (int m = i; m < i + distance; m++)
                for (int l = 0; l < LANES; l++) {
                    const float a = v[m][l], b = v[m + distance][l];
                    v[m][l] = a + b;
                    v[m + distance][l] = a - b;
                }
    for (int i = 0; i < group; i++)
        for (int l = 0; l < LANES; l++) v[i][l] *= j->hadamard_scale;
}

/* Bits of the largest magnitude of 32 values in each lane: as integers, NaN is the largest. */
static void block_amax(float (*restrict v)[LANES], int32_t *restrict amax) {
    int32_t most[LANES] = {0};
    for (int i = 0; i < BLOCK; i++)
        for (int l = 0; l < LANES; l++) {
            const int32_t b = bits_of(v[i][l]) & 0x7FFFFFFF;
            most[l] = b > most[l] ? b : most[l];
        }
    memcpy(amax, most, sizeof most);
}

/* Philox4x32-7; LANES counters at a time. */
static void philox(uint64_t seed, const uint64_t *restrict index, uint32_t stream, uint32_t (*restrict word)[LANES]) {
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES], k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int l = 0; l < LANES; l++) {
        c0[l] = (uint32_t)index[l];
        c1[l] = (uint32_t)(index[l] >> 32);
        c2[l] = 0; /* philox.FOR_ROUNDING */
        c3[l] = stream;
    }
    for (int round = 0; round < 7; round++) {
        for (int l = 0; l < LANES; l++) {
            const uint64_t a = (uint64_t)c0[l] * 0xD2511F53u, b = (uint64_t)c2[l] * 0xCD9E8D57u;
            c0[l] = (uint32_t)(b >> 32) ^ c1[l] ^ k0;
            c1[l] = (uint32_t)b;
            c2[l] = (uint32_t)(a >> 32) ^ c3[l] ^ k1;
            c3[l] = (uint32_t)a;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    memcpy(word[0], c0, sizeof c0);
    memcpy(word[1], c1, sizeof c1);
    memcpy(word[2], c2, sizeof c2);
    memcpy(word[3], c3, sizeof c3);
}

/* The signs of the rotation, +1 or -1: those of sign_words, or one Philox call of stream / 2. */
static void signs_of(const job *j, float *restrict signs) {
    uint32_t word[4];
    memcpy(word, j->sign_words, sizeof word);
    if (j->sign_kind == 2) {
        uint32_t c0 = 0, c1 = 0, c2 = 1 /* philox.FOR_SIGNS */, c3 = j->stream / 2;
        uint32_t k0 = (uint32_t)j->seed, k1 = (uint32_t)(j->seed >> 32);
        for (int round = 0; round < 7; round++) {
            const uint64_t a = (uint64_t)c0 * 0xD2511F53u, b = (uint64_t)c2 * 0xCD9E8D57u;
            c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
            c1 = (uint32_t)b;
            c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)a;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
    }
    for (int i = 0; i < MAX_GROUP; i++) signs[i] = word[i / 32] >> (i % 32) & 1 ? -1.0f : 1.0f;
}

/* Magnitude codes of 32 values times `inverse`: rounding.py and formats.encode in one. E2M1 to nearest: the code of u
   is 2u rounded to even below 2, u + 2 below 4, u / 2 + 4 beyond, which is the least of the three; at 2^22 one ulp is
   1/2. `random`: four words for each eight values. */
static inline __attribute__((always_inline)) void encode(
    float (*restrict v)[LANES], const float *restrict inverse, uint32_t (*restrict random)[4][LANES],
    int32_t (*restrict code)[LANES], const int mbits, const int bias, const int32_t max_code, const int stochastic) {
    const int shift = 23 - mbits;
    const float least = float_of((127 + 1 - bias) << 23), per_step = float_of((127 - (1 - bias - mbits)) << 23);
    const float anchor = float_of((127 + 1 - bias - mbits + 23) << 23);
    for (int i = 0; i < BLOCK; i++)
        for (int l = 0; l < LANES; l++) {
            const float u = float_of(bits_of(v[i][l]) & 0x7FFFFFFF) * inverse[l];
            int32_t c;
            if (mbits == 1 && !stochastic) {
                const float low = u + 4194304.0f, middle = u * 0.5f + 4194305.0f, high = u * 0.25f + 4194306.0f;
                float r = low < middle ? low : middle;
                r = r < high ? r : high;
                c = bits_of(r) - 0x4A800000;
            } else {
                const int32_t b = bits_of(u);
                int32_t normal, below;
                if (stochastic) {
                    const uint32_t w = random[i / 8][i % 8 / 2][l];
                    const int32_t up = (int32_t)(i % 2 ? w >> 16 : w & 0xFFFF);
                    const float small = u < least ? u : 0.0f;
                    normal = (b + (up << (shift - 16))) >> shift;
                    below = ((int32_t)(small * (65536.0f * per_step)) + up) >> 16;
                } else {
                    normal = (b + ((1 << (shift - 1)) - 1) + ((b >> shift) & 1)) >> shift;
                    below = bits_of(u + anchor) & ((2 << mbits) - 1);
                }
                c = u < least ? below : normal - ((127 - bias) << mbits);
            }
            code[i][l] = c < max_code ? c : max_code;
        }
}

static void write_codes(const job *j, int64_t line, int n, int64_t block, float (*restrict v)[LANES],
                        int32_t (*restrict code)[LANES], const int32_t *restrict keep) {
    const int fp4 = j->mbits == 1, per_word = fp4 ? 8 : 4, width = fp4 ? 4 : 8, words = BLOCK / per_word;
    uint32_t word[8][LANES];
    for (int w = 0; w < words; w++) {
        for (int l = 0; l < LANES; l++) word[w][l] = 0;
        for (int m = 0; m < per_word; m++)
            for (int l = 0; l < LANES; l++) {
                const int i = w * per_word + m;
                const uint32_t sign = (uint32_t)bits_of(v[i][l]) >> 31;
                word[w][l] |= ((uint32_t)code[i][l] | sign << (width - 1)) << (m * width);
            }
        for (int l = 0; l < LANES; l++) word[w][l] &= (uint32_t)keep[l];
    }
    uint8_t *out = (uint8_t *)j->out + (line * (j->k / BLOCK) + block) * words * 4;
    for (int l = 0; l < n; l++) {
        uint32_t row[8];
        for (int w = 0; w < words; w++) row[w] = word[w][l];
        memcpy(out + l * (j->k / BLOCK) * words * 4, row, words * 4); /* little-endian, as packing is */
    }
}

static void write_values(const job *j, int64_t line, int n, int64_t block, float (*restrict v)[LANES],
                         int32_t (*restrict code)[LANES], const int32_t *restrict scale_bits) {
    const int mbits = (int)j->mbits, bias = (int)j->bias;
    const float step = float_of((127 + 1 - bias - mbits) << 23);
    float value[BLOCK][LANES];
    for (int i = 0; i < BLOCK; i++)
        for (int l = 0; l < LANES; l++) {
            const int32_t c = code[i][l];
            const float normal = float_of((c + ((127 - bias) << mbits)) << (23 - mbits)), below = (float)c * step;
            const int32_t sign = bits_of(v[i][l]) & (int32_t)0x80000000;
            value[i][l] = (c < (1 << mbits) ? below : normal) * float_of(scale_bits[l] | sign);
        }
    const int64_t at = line * j->k + block * BLOCK;
    float lines[LANES][BLOCK];
    float *const out = j->out_kind == OUT_FLOAT32 && n == LANES ? (float *)j->out + at : lines[0];
    for (int l = 0; l < LANES; l += 8)
        for (int i = 0; i < BLOCK; i += 8)
            transpose8(&value[i][l], LANES, out + l * (out == lines[0] ? BLOCK : j->k) + i, out == lines[0] ? BLOCK : j->k);
    if (j->out_kind == OUT_FLOAT32) {
        if (out == lines[0])
            for (int l = 0; l < n; l++) memcpy((float *)j->out + at + l * j->k, lines[l], sizeof lines[l]);
    } else {
        for (int l = 0; l < n; l++)
            for (int i = 0; i < BLOCK; i++) {
                const uint32_t b = (uint32_t)bits_of(lines[l][i]);
                const uint32_t rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16; /* to nearest even */
                ((uint16_t *)j->out)[at + l * j->k + i] = (uint16_t)((b & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
            }
    }
}

/* Quantize 32 values of `n` lines whose block maxima are `amax`. `line` counts across batches. */
static void write_block(const job *j, int64_t line, int n, int64_t block, float (*restrict v)[LANES],
                        const int32_t *restrict amax) {
    const int64_t blocks = j->k / BLOCK;
    int32_t byte[LANES], keep[LANES], scale_bits[LANES], code[BLOCK][LANES];
    float inverse[LANES];
    for (int l = 0; l < LANES; l++) {
        const int32_t bad = amax[l] >= 0x7F800000;
        int32_t b = (int32_t)(((uint32_t)amax[l] + (uint32_t)j->addend) >> 23) - (int32_t)j->emax;
        b = b < 0 ? 0 : b;
        b = bad ? 255 : b;
        byte[l] = b;
        keep[l] = bad ? 0 : -1;
        inverse[l] = float_of(bad ? 0 : (254 - b) << 23);
        scale_bits[l] = bad ? 0x7FC00000 : b == 0 ? 0x00400000 : b << 23; /* 2^-127 is an FP32 subnormal */
    }
    uint32_t random[4][4][LANES];
    if (j->stochastic)
        for (int call = 0; call < 4; call++) {
            uint64_t index[LANES];
            for (int l = 0; l < LANES; l++) index[l] = (uint64_t)((line + l) * blocks + block) * 4 + (uint64_t)call;
            philox(j->seed, index, j->stream, random[call]);
        }
    const int max_code = (int)j->max_code;
    if (j->mbits == 1 && !j->stochastic) encode(v, inverse, random, code, 1, 1, max_code, 0);
    else if (j->mbits == 1) encode(v, inverse, random, code, 1, 1, max_code, 1);
    else if (j->mbits == 3 && !j->stochastic) encode(v, inverse, random, code, 3, 7, max_code, 0);
    else if (j->mbits == 3) encode(v, inverse, random, code, 3, 7, max_code, 1);
    else if (!j->stochastic) encode(v, inverse, random, code, 2, 15, max_code, 0);
    else encode(v, inverse, random, code, 2, 15, max_code, 1);
    if (j->out_kind != OUT_CODES) {
        write_values(j, line, n, block, v, code, scale_bits);
        return;
    }
    write_codes(j, line, n, block, v, code, keep);
    if (!j->two_d)
        for (int l = 0; l < n; l++) j->scale[(line + l) * blocks + block] = (uint8_t)byte[l];
    else if (line % BLOCK == 0)
        j->scale[line / BLOCK * blocks + block] = (uint8_t)byte[0];
}

/* Lines `first` to `last` of all batches together; for 2D blocks both are multiples of 32. */
void mxfp4_quantize(const job *j, int64_t first, int64_t last) {
    const int group = j->hadamard > BLOCK ? (int)j->hadamard : BLOCK;
    const int side = j->two_d ? BLOCK : LANES;
    static _Thread_local float v[BLOCK / LANES][MAX_GROUP][LANES];
    int32_t amax[BLOCK / LANES][MAX_GROUP / BLOCK][LANES];
    float signs[MAX_GROUP];
    if (j->sign_kind) signs_of(j, signs);
    for (int64_t line = first; line < last;) {
        const int64_t batch = line / j->lines, within = line % j->lines;
        int64_t n = side;
        if (n > j->lines - within) n = j->lines - within;
        if (n > last - line) n = last - line;
        for (int64_t k = 0; k < j->k; k += group) {
            for (int part = 0; part * LANES < n; part++) {
                const int here = (int)(n - part * LANES < LANES ? n - part * LANES : LANES);
                load(j, batch, within + part * LANES, here, k, group, v[part]);
                if (j->prescaled)
                    for (int i = 0; i < group; i++)
                        for (int l = 0; l < LANES; l++) v[part][i][l] *= 0.75f; /* operand_plan.PRESCALE */
                if (j->hadamard) rotate(j, signs, group, v[part]);
                for (int b = 0; b < group / BLOCK; b++) block_amax(v[part] + b * BLOCK, amax[part][b]);
            }
            if (j->two_d)
                for (int b = 0; b < group / BLOCK; b++) {
                    int32_t most = 0;
                    for (int part = 0; part < BLOCK / LANES; part++)
                        for (int l = 0; l < LANES; l++) most = amax[part][b][l] > most ? amax[part][b][l] : most;
                    for (int part = 0; part < BLOCK / LANES; part++)
                        for (int l = 0; l < LANES; l++) amax[part][b][l] = most;
                }
            for (int part = 0; part * LANES < n; part++) {
                const int here = (int)(n - part * LANES < LANES ? n - part * LANES : LANES);
                for (int b = 0; b < group / BLOCK; b++)
                    write_block(j, line + part * LANES, here, k / BLOCK + b, v[part] + b * BLOCK, amax[part][b]);
            }
        }
        line += n;
    }
}

/* The scale of `fp8.fp8_scale` for the n values of x; 1 / scale goes to `factor`. */
float mxfp4_fp8_scale(const float *restrict x, int64_t n, int mbits, float *restrict factor) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        const int32_t b = bits_of(x[i]) & 0x7FFFFFFF;
        most = b > most ? b : most; /* as integers, NaN is the largest */
    }
    const float amax = float_of(most), largest = 3.40282346638528859812e38f;
    float scale = (1.0f / amax) * (mbits == 3 ? 448.0f : 57344.0f);
    scale = most == 0 ? 1.0f : scale > largest ? largest : scale;
    *factor = 1.0f / scale;
    return scale;
}

/* out = x * scale rounded to E4M3 (mbits 3) or E5M2 (2), to nearest even, in FP32, as torch's float8 casts do; what
   the format cannot reach (a caller scales so that nothing is there) ends at its largest value, NaN stays NaN. */
void mxfp4_scaled_fp8(const float *restrict x, float *restrict out, int64_t n, float scale, int mbits) {
    const int bias = mbits == 3 ? 7 : 15, shift = 23 - mbits;
    const float least = float_of((127 + 1 - bias) << 23), anchor = float_of((127 + 1 - bias - mbits + 23) << 23);
    const float max = mbits == 3 ? 448.0f : 57344.0f;
    for (int64_t i = 0; i < n; i++) {
        const float y = x[i] * scale;
        const int32_t b = bits_of(y) & 0x7FFFFFFF, sign = bits_of(y) & (int32_t)0x80000000;
        const float u = float_of(b), below = (u + anchor) - anchor;
        const float normal = float_of((b + ((1 << (shift - 1)) - 1) + ((b >> shift) & 1)) & -(1 << shift));
        float r = u < least ? below : normal;
        r = r > max ? max : r;
        r = b >= 0x7F800000 ? float_of(0x7FC00000) : r;
        out[i] = float_of(bits_of(r) | sign);
    }
}
