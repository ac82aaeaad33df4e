// All layers of an action expert in one kernel: see layers.py. 128 blocks of 256 threads stay on the chip, in groups of
// 8 that share outputs; a barrier over all blocks stands between two phases of a layer, one over a group between its
// blocks' sums and their addition. (Hardware clusters of 8 would exchange sums faster, but only 15 of the 16 fit on an
// H200.) "Row" is a token, "lane" a thread of a warp: g = lane / 4, t = lane % 4.
//
// Products: mma.m16n8k16 with 4 tiles of 16 tokens and 8 outputs a tile. A thread reads 16 bytes of a weight's row and
// 16 of a token's: the 8 inputs of each are taken as the operand's pairs in the same order on both sides, which permutes
// the inputs of a sum and nothing else. So a weight goes from memory into registers, without shared memory.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int BLOCKS = 128, THREADS = 256, GROUP = 8;
constexpr int WIDTH = 1024, HIDDEN = 4096, HEADS = 8, DIM = 256, HALF = 128;
constexpr int MOST_ROWS = 56, MOST_KEYS = 128;

// Shared memory, bytes: A and B are the two large areas; each phase says what it keeps where.
constexpr int AREA_A = 0, AREA_B = 78848, VECTORS = AREA_B + 135168, STREAM = VECTORS + 8192;
constexpr int INVERSE = STREAM + MOST_ROWS * 8 * 4;
constexpr int PART = 9216;                         // floats that a block may leave for its group
constexpr int KV_ROW = 528;                       // bytes of a key or value row: 256 values and a pad against conflicts
constexpr int Q_AT = AREA_A, P_AT = Q_AT + 32 * KV_ROW, P_ROW = 272;
constexpr int PEAKS = P_AT + 32 * P_ROW, SUMS = PEAKS + 8 * 32 * 4, PEAK = SUMS + 8 * 32 * 4, SUM = PEAK + 128;

extern __shared__ __align__(128) u8 shared[];

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float a, float b) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}
__device__ __forceinline__ float rounded(float a) { return low(pack(a, 0.f)); }
__device__ __forceinline__ float widened(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ u16 narrowed(float a) { return (u16)(pack(a, 0.f) & 0xffffu); }
__device__ __forceinline__ float power_of_2(float a) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}

__device__ __forceinline__ uint4 weight_16(const u16* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ float4 past_l1(const float* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}
// 16 bytes from memory into shared memory, past L1; zeros where there is nothing.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool there = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
__device__ __forceinline__ void fetch(const void* p, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void matrices_turned(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ float past_l1_1(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

// The barrier over all blocks, in two halves: what stands between them needs nobody's results.
__device__ __forceinline__ void arrive(u32* counter) {
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("fence.acq_rel.gpu;\nred.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void await(u32* counter, u32 count) {
    if (threadIdx.x == 0) {
        u32 seen, tries = 0;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
            if (++tries > 1u << 23) __trap();  // seconds: a block that never came must not hang the robot
        } while (seen < count);
    }
    __syncthreads();
}

// The barrier over the blocks of a group.
__device__ __forceinline__ void meet(u32* counter, u32 count) {
    arrive(counter);
    await(counter, count);
}

// Weights of the first blocks of 32 inputs, asked for before they are needed.
template <int NT, int PRE, class Offset>
__device__ __forceinline__ void load_weights(uint4 (&w)[PRE][NT], const u16* base, Offset offset) {
#pragma unroll
    for (int s = 0; s < PRE; s++)
#pragma unroll
        for (int n = 0; n < NT; n++) w[s][n] = weight_16(base + offset(n) + s * 32);
}

__device__ __forceinline__ u32 normed(u32 v, float inverse, float2 scale, float2 shift) {
    return pack(low(v) * inverse * (1.f + scale.x) + shift.x, high(v) * inverse * (1.f + scale.y) + shift.y);
}

// One warp's part: MT tiles of tokens, NT of outputs, KS blocks of 32 inputs. `tokens` is the warp's first token and
// input in shared memory, `scale` and `shift` its first input; with NORM each token is normed on the way.
template <int NT, int KS, int MT, int PRE, bool NORM, class Offset>
__device__ __forceinline__ void multiply(float (&acc)[MT][NT][4], uint4 (&w)[PRE][NT], const u16* base, Offset offset,
                                         const u8* tokens, int token_bytes, const float* inverse, const float* scale,
                                         const float* shift) {
    const int g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = 0.f;
#pragma unroll
    for (int s = 0; s < KS; s++) {
        float2 gain[4], move[4];
        if (NORM) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                gain[i] = *(const float2*)(scale + s * 32 + t * 8 + i * 2);
                move[i] = *(const float2*)(shift + s * 32 + t * 8 + i * 2);
            }
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
            const u8* at = tokens + (m * 16 + g) * token_bytes + s * 64 + t * 16;
            uint4 a = *(const uint4*)at, b = *(const uint4*)(at + 8 * token_bytes);
            if (NORM) {
                const float x = inverse[m * 16 + g], y = inverse[m * 16 + g + 8];
                a = make_uint4(normed(a.x, x, gain[0], move[0]), normed(a.y, x, gain[1], move[1]),
                               normed(a.z, x, gain[2], move[2]), normed(a.w, x, gain[3], move[3]));
                b = make_uint4(normed(b.x, y, gain[0], move[0]), normed(b.y, y, gain[1], move[1]),
                               normed(b.z, y, gain[2], move[2]), normed(b.w, y, gain[3], move[3]));
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const uint4 v = w[s % PRE][n];
                mma(acc[m][n], a.x, b.x, a.y, b.y, v.x, v.y);
                mma(acc[m][n], a.z, b.z, a.w, b.w, v.z, v.w);
            }
        }
        if (s + PRE < KS)
#pragma unroll
            for (int n = 0; n < NT; n++) w[s % PRE][n] = weight_16(base + offset(n) + (s + PRE) * 32);
    }
}

// Store a warp's sums into its slice [MOST_ROWS][N + 8] of `sums`.
template <int NT, int MT> __device__ __forceinline__ void keep(const float (&acc)[MT][NT][4], float* sums, int first) {
    const int g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
    constexpr int ROW = NT * 8 + 8;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int row = first + m * 16 + g;
            if (row < MOST_ROWS) *(float2*)(sums + row * ROW + n * 8 + t * 2) = make_float2(acc[m][n][0], acc[m][n][1]);
            if (row + 8 < MOST_ROWS)
                *(float2*)(sums + (row + 8) * ROW + n * 8 + t * 2) = make_float2(acc[m][n][2], acc[m][n][3]);
        }
}

// Add the slices of the block's warps and leave the sums [rows][N] for the group.
template <int N, int SLICES> __device__ __forceinline__ void leave_sums(const float* sums, float* part, int rows) {
    constexpr int ROW = N + 8, SIZE = MOST_ROWS * ROW;
    for (int i = threadIdx.x; i < rows * (N / 4); i += THREADS) {
        const float4* at = (const float4*)(sums + i / (N / 4) * ROW + i % (N / 4) * 4);
        float4 v = *at;
#pragma unroll
        for (int s = 1; s < SLICES; s++) {
            const float4 o = *(const float4*)((const float*)at + s * SIZE);
            v.x += o.x, v.y += o.y, v.z += o.z, v.w += o.w;
        }
        ((float4*)part)[i] = v;
    }
}

// A slice of every token, `inputs` values from `from` on, into shared memory.
__device__ __forceinline__ void copy_tokens(u32 to, int token_bytes, const u16* from, int stride, int inputs, int rows) {
    const int pieces = inputs / 8;
    for (int i = threadIdx.x; i < rows * pieces; i += THREADS)
        copy_16(to + i / pieces * token_bytes + i % pieces * 16, from + (u64)(i / pieces) * stride + i % pieces * 8);
}

// 1 / rms of each token from the partial squares [row][BLOCKS].
__device__ __forceinline__ void find_inverses(const float* squares, int rows) {
    float* inverse = (float*)(shared + INVERSE);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float4 v[7];
#pragma unroll
    for (int i = 0; i < 7; i++)
        if (warp + i * 8 < rows) v[i] = past_l1(squares + (warp + i * 8) * BLOCKS + lane * 4);
#pragma unroll
    for (int i = 0; i < 7; i++) {
        if (warp + i * 8 >= rows) break;
        float s = v[i].x + v[i].y + v[i].z + v[i].w;
        for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
        if (lane == 0) inverse[warp + i * 8] = rsqrtf(s / WIDTH + 1e-6f);
    }
}

struct Norm {  // vectors of one norm; shift and gate may be absent
    const float *scale, *shift, *gate;
};

struct Args {
    const u16* x;
    u16* out;
    const u64* weights;  // [depth][4]: qkv, o, gate_up, down
    const float* norms;  // [2 * depth + 1][vectors][WIDTH]
    const float *cos, *sin;
    u16 *keys, *values;  // [depth][columns][DIM]
    const long long *start, *lengths;
    u16 *query, *mixed, *inner, *stream;
    float *squares, *parts;  // of the blocks: [rows][BLOCKS], [BLOCKS][PART]
    u32* counter;
    int rows, depth, columns, vectors;
    __device__ Norm norm(int index) const {
        const float* at = norms + (u64)index * vectors * WIDTH;
        return {at, vectors == 3 ? at + WIDTH : nullptr, vectors == 3 ? at + 2 * WIDTH : nullptr};
    }
};

// scale and shift of inputs `first` on into shared memory.
__device__ __forceinline__ void copy_vectors(Norm norm, int first, int count) {
    const u32 to = address(shared + VECTORS);
    for (int i = threadIdx.x; i < count / 4; i += THREADS) {
        copy_16(to + i * 16, norm.scale + first + i * 4);
        copy_16(to + (count + i * 4) * 4, norm.shift ? norm.shift + first + i * 4 : norm.scale, norm.shift != nullptr);
    }
    close_copies();
}

// The end of a sub-layer: the group's sums of 64 outputs, of which this block takes 8: gate, residual add, squares.
__device__ __forceinline__ void end_sublayer(const Args& a, const float* gate_vector, int cluster, int rank, bool last) {
    float* stream = (float*)(shared + STREAM);
    const int column = threadIdx.x % 8, output = cluster * 64 + rank * 8 + column;
    const float gate = gate_vector ? rounded(gate_vector[output]) : 1.f;
    const float* parts = a.parts + cluster * GROUP * PART + rank * 8 + column;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = half * 32 + threadIdx.x / 8;
        float v = 0.f;
        if (row < a.rows) {
            float sum = 0.f, one[GROUP];
#pragma unroll
            for (int r = 0; r < GROUP; r++) one[r] = past_l1_1(parts + r * PART + row * 64);
#pragma unroll
            for (int r = 0; r < GROUP; r++) sum += one[r];
            float out = rounded(sum);
            if (gate_vector) out = rounded(gate * out);
            v = rounded(stream[row * 8 + column] + out);
            stream[row * 8 + column] = v;
            (last ? a.out : a.stream)[row * WIDTH + output] = narrowed(v);
        }
        v *= v;
        for (int d = 4; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
        if (column == 0 && row < a.rows) a.squares[row * BLOCKS + cluster * GROUP + rank] = v;
    }
}

// Columns [first, first + count) of the slab that this block attends to, those from `begin` to `end` - 1.
__device__ __forceinline__ void copy_columns(const u16* keys, const u16* values, int first, int count, int begin, int end) {
    const u32 to = address(shared + AREA_B);
    for (int i = threadIdx.x; i < count * 32; i += THREADS) {
        const int column = first + i / 32;
        if (column < begin || column >= end) continue;
        const u64 from = (u64)column * DIM + i % 32 * 8;
        copy_16(to + i / 32 * KV_ROW + i % 32 * 16, keys + from);
        copy_16(to + MOST_KEYS * KV_ROW + i / 32 * KV_ROW + i % 32 * 16, values + from);
    }
}

// Zeros behind the last column: 0 times what stood there must be 0.
__device__ __forceinline__ void clear_columns(int first, int count, int length) {
    for (int i = threadIdx.x; i < count * 32; i += THREADS)
        if (first + i / 32 >= length) {
            *(uint4*)(shared + AREA_B + i / 32 * KV_ROW + i % 32 * 16) = make_uint4(0, 0, 0, 0);
            *(uint4*)(shared + AREA_B + (MOST_KEYS + i / 32) * KV_ROW + i % 32 * 16) = make_uint4(0, 0, 0, 0);
        }
}

// A group: half the tokens of one head; a block: an eighth of the columns.
__device__ __forceinline__ void attend(const Args& a, int cluster, int rank, int first, int count, int length, u32* meeting,
                                       u32 count_of_meetings) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int head = cluster / 2, half = (a.rows + 1) / 2, top = cluster % 2 * half;
    const u32 base = address(shared);
    for (int i = threadIdx.x; i < 32 * 32; i += THREADS) {
        const int row = i / 32;
        const bool there = row < half && top + row < a.rows;
        copy_16(base + Q_AT + row * KV_ROW + i % 32 * 16,
                a.query + ((u64)head * MOST_ROWS + (there ? top + row : 0)) * DIM + i % 32 * 8, there);
    }
    close_copies();
    clear_columns(first, count, length);
    await_copies<0>();
    __syncthreads();

    float s[2][2][4] = {};
    const bool busy = warp * 16 < count;
    if (busy) {
#pragma unroll
        for (int k = 0; k < DIM; k += 16) {
            u32 q0[4], q1[4], key[4];
            const int row = lane % 16, side = lane / 16 * 16;
            matrices(q0, base + Q_AT + row * KV_ROW + k * 2 + side);
            matrices(q1, base + Q_AT + (16 + row) * KV_ROW + k * 2 + side);
            // keys 0-7 and 8-15 of the warp, low and high half of the 16 inputs
            matrices(key, base + AREA_B + (warp * 16 + lane % 8 + lane / 16 * 8) * KV_ROW + k * 2 + lane / 8 % 2 * 16);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                mma(s[0][n], q0[0], q0[1], q0[2], q0[3], key[n * 2], key[n * 2 + 1]);
                mma(s[1][n], q1[0], q1[1], q1[2], q1[3], key[n * 2], key[n * 2 + 1]);
            }
        }
    }
    float* peaks = (float*)(shared + PEAKS);
    float* sums = (float*)(shared + SUMS);
    float* peak = (float*)(shared + PEAK);
    float* sum = (float*)(shared + SUM);
    constexpr float SCALE = 0.0625f * 1.4426950408889634f;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = -1e30f;
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& v = s[m][n][h * 2 + i];
                    const int column = warp * 16 + n * 8 + t * 2 + i;
                    v = busy && column < count && first + column < length ? v * SCALE : -__int_as_float(0x7f800000);
                    most = fmaxf(most, v);
                }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            if (t == 0) peaks[warp * 32 + m * 16 + h * 8 + g] = most;
        }
    __syncthreads();
    if (threadIdx.x < 32) {
        float most = peaks[threadIdx.x];
        for (int w = 1; w < 8; w++) most = fmaxf(most, peaks[w * 32 + threadIdx.x]);
        peak[threadIdx.x] = most;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = m * 16 + h * 8 + g;
            const float most = peak[row];
            float total = 0.f;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float p0 = power_of_2(s[m][n][h * 2] - most), p1 = power_of_2(s[m][n][h * 2 + 1] - most);
                total += p0 + p1;
                *(u32*)(shared + P_AT + row * P_ROW + (warp * 16 + n * 8 + t * 2) * 2) = pack(p0, p1);
            }
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if (t == 0) sums[warp * 32 + row] = total;
        }
    __syncthreads();
    if (threadIdx.x < 32) {
        float total = 0.f;
        for (int w = 0; w < 8; w++) total += sums[w * 32 + threadIdx.x];
        sum[threadIdx.x] = total;
    }
    float o[2][4][4] = {};
#pragma unroll
    for (int k = 0; k < MOST_KEYS; k += 16) {
        if (k >= count) break;
        u32 p0[4], p1[4];
        const int row = lane % 16, side = lane / 16 * 16;
        matrices(p0, base + P_AT + row * P_ROW + k * 2 + side);
        matrices(p1, base + P_AT + (16 + row) * P_ROW + k * 2 + side);
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            u32 v[4];  // columns k to k+7 and k+8 to k+15, for two tiles of 8 values
            matrices_turned(v, base + AREA_B + (MOST_KEYS + k + lane % 16) * KV_ROW + (warp * 32 + n * 8) * 2 + side);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                mma(o[0][n + j], p0[0], p0[1], p0[2], p0[3], v[j * 2], v[j * 2 + 1]);
                mma(o[1][n + j], p1[0], p1[1], p1[2], p1[3], v[j * 2], v[j * 2 + 1]);
            }
        }
    }
    float* out = a.parts + (cluster * GROUP + rank) * PART;  // [32][DIM] sums, then peaks and weights of the 32 rows
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float* at = out + (m * 16 + g) * DIM + warp * 32 + n * 8 + t * 2;
            *(float2*)at = make_float2(o[m][n][0], o[m][n][1]);
            *(float2*)(at + 8 * DIM) = make_float2(o[m][n][2], o[m][n][3]);
        }
    if (threadIdx.x < 32) {
        out[32 * DIM + threadIdx.x] = peak[threadIdx.x];
        out[33 * DIM + threadIdx.x] = sum[threadIdx.x];
    }
    meet(meeting, count_of_meetings);
    const int row = threadIdx.x / 8, at = rank * 32 + threadIdx.x % 8 * 4;
    if (row < half && top + row < a.rows) {
        const float* parts = a.parts + cluster * GROUP * PART;
        float highest = -1e30f, peaks_of[GROUP], weights[GROUP], total = 0.f;
        float4 part[GROUP], mixed = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int r = 0; r < GROUP; r++) {
            peaks_of[r] = past_l1_1(parts + r * PART + 32 * DIM + row);
            weights[r] = past_l1_1(parts + r * PART + 33 * DIM + row);
            part[r] = past_l1(parts + r * PART + row * DIM + at);
        }
#pragma unroll
        for (int r = 0; r < GROUP; r++) highest = fmaxf(highest, peaks_of[r]);
#pragma unroll
        for (int r = 0; r < GROUP; r++) {
            const float w = power_of_2(peaks_of[r] - highest);
            total += w * weights[r];
            mixed.x += w * part[r].x, mixed.y += w * part[r].y, mixed.z += w * part[r].z, mixed.w += w * part[r].w;
        }
        const float one = 1.f / total;
        *(uint2*)(a.mixed + (u64)(top + row) * (HEADS * DIM) + head * DIM + at) =
            make_uint2(pack(mixed.x * one, mixed.y * one), pack(mixed.z * one, mixed.w * one));
    }
}

// Rotate and write the queries, keys and values of the quad's 5 pairs of tiles; this block takes each fourth token.
__device__ __forceinline__ void end_projection(const Args& a, u16* keys, u16* values, int quad, int part, int start) {
    const float* parts = a.parts + quad * 4 * PART;
    const int tokens = (a.rows - part + 3) / 4;
    for (int i = threadIdx.x; i < tokens * 40; i += THREADS) {
        const int row = i / 40 * 4 + part, duo = i % 40 / 8, pair = i % 8;
        float x = 0.f, y = 0.f, low_of[4], high_of[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            low_of[r] = past_l1_1(parts + r * PART + row * 80 + duo * 16 + pair);
            high_of[r] = past_l1_1(parts + r * PART + row * 80 + duo * 16 + 8 + pair);
        }
#pragma unroll
        for (int r = 0; r < 4; r++) x += low_of[r], y += high_of[r];
        const int d = quad * 5 + duo, head = d / 16, place = d % 16 * 8 + pair;
        if (head <= HEADS) {
            const float c = a.cos[row * HALF + place], s = a.sin[row * HALF + place], z = x;
            x = z * c - y * s;
            y = y * c + z * s;
        }
        u16* to = head < HEADS ? a.query + ((u64)head * MOST_ROWS + row) * DIM
                               : (head == HEADS ? keys : values) + (u64)(start + row) * DIM;
        to[place] = narrowed(x);
        to[place + HALF] = narrowed(y);
    }
}

extern "C" __global__ void __launch_bounds__(256, 1)
layers(const u16* x, u16* out, const u64* weights, const float* norms, const float* cos, const float* sin, u16* all_keys,
       u16* all_values, const long long* starts, const long long* lengths, u16* scratch, float* squares, float* parts,
       u32* counter, int rows, int depth, int columns, int vectors) {
    Args a;
    a.x = x, a.out = out, a.weights = weights, a.norms = norms, a.cos = cos, a.sin = sin;
    a.query = scratch, a.mixed = a.query + HEADS * MOST_ROWS * DIM, a.inner = a.mixed + MOST_ROWS * HEADS * DIM;
    a.stream = a.inner + MOST_ROWS * HIDDEN;
    a.squares = squares, a.parts = parts, a.counter = counter;
    a.rows = rows, a.depth = depth, a.columns = columns, a.vectors = vectors;
    const int block = blockIdx.x, cluster = block / GROUP, rank = block % GROUP;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int start = (int)starts[0], length = (int)min(lengths[0], (long long)columns);
    const int count = min(((length + 7) / 8 + 15) / 16 * 16, MOST_KEYS), first = rank * count;
    const int quad = cluster * 2 + rank / 4, part = rank % 4;
    const float* inverse = (const float*)(shared + INVERSE);
    const float* scale = (const float*)(shared + VECTORS);
    u32 phase = 0, quad_meetings = 0, meetings = 0;
    u32 *const quad_counter = counter + 32 * (1 + quad), *const group_counter = counter + 32 * (33 + cluster);
    float* const left = parts + block * PART;

    auto tile = [&](int n) {  // row of the merged QKV projection of tile n: both halves of a head's rotary pairs
        const int d = quad * 5 + n / 2;
        return (d / 16 * DIM + d % 16 * 8 + n % 2 * HALF) * WIDTH;
    };
    auto of_mixed = [&](int n) { return n * 8 * HEADS * DIM; };
    auto of_inner = [&](int n) { return n * 8 * HIDDEN; };
    auto gate_or_up = [&](int n) { return n < 4 ? n * 8 * WIDTH : (HIDDEN + (n - 4) * 8) * WIDTH; };

    {  // the stream: this block keeps 8 columns of it
        float* stream = (float*)(shared + STREAM);
        const int column = threadIdx.x % 8, output = cluster * 64 + rank * 8 + column;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = half * 32 + threadIdx.x / 8;
            float v = 0.f;
            if (row < rows) {
                v = widened(x[row * WIDTH + output]);
                stream[row * 8 + column] = v;
                a.stream[row * WIDTH + output] = narrowed(v);
            }
            v *= v;
            for (int d = 4; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
            if (column == 0 && row < rows) squares[row * BLOCKS + block] = v;
        }
    }

    for (int layer = 0; layer < depth; layer++) {
        const u16* qkv = (const u16*)weights[layer * 4];
        const u16* o = (const u16*)weights[layer * 4 + 1];
        const u16* gate_up = (const u16*)weights[layer * 4 + 2];
        const u16* down = (const u16*)weights[layer * 4 + 3];
        u16* keys = all_keys + (u64)layer * columns * DIM;
        u16* values = all_values + (u64)layer * columns * DIM;
        const Norm before = a.norm(2 * layer), between = a.norm(2 * layer + 1);

        {  // QKV: a quad of blocks has 80 outputs, a block 256 inputs of them; warps: 2 halves of the tokens, 4 spans
            arrive(counter);
            const int group = warp / 4, span = warp % 4;
            const u16* base = qkv + g * WIDTH + part * 256 + span * 64 + t * 8;
            uint4 w[2][10];
            load_weights(w, base, tile);
            copy_vectors(before, part * 256, 256);
            await(counter, ++phase * BLOCKS);
            copy_tokens(address(shared + AREA_A), 576, a.stream + part * 256, WIDTH, 256, rows);
            close_copies();
            copy_columns(keys, values, first, count, 0, min(start, length));
            close_copies();
            if (threadIdx.x < 64) {
                fetch(o + (u64)(cluster * 64 + threadIdx.x) * HEADS * DIM + rank * 256, 512);
                const int row = threadIdx.x % 32 + (threadIdx.x < 32 ? 0 : HIDDEN);
                fetch(gate_up + (u64)(block * 32 + row) * WIDTH, 2048);
            }
            find_inverses(squares, rows);
            await_copies<1>();
            __syncthreads();
            float acc[2][10][4];
            multiply<10, 2, 2, 2, true>(acc, w, base, tile, shared + AREA_A + group * 32 * 576 + span * 128, 576,
                                        inverse + group * 32, scale + span * 64, scale + 256 + span * 64);
            __syncthreads();
            float* sums = (float*)(shared + AREA_A);
            keep<10, 2>(acc, sums + span * MOST_ROWS * 88, group * 32);
            __syncthreads();
            leave_sums<80, 4>(sums, left, rows);
            meet(quad_counter, ++quad_meetings * 4);
            end_projection(a, keys, values, quad, part, start);
        }
        {
            arrive(counter);
            await(counter, ++phase * BLOCKS);
            copy_columns(keys, values, first, count, start, length);
            attend(a, cluster, rank, first, count, length, group_counter, ++meetings * GROUP);
        }
        {  // O: a cluster has 64 outputs, a block 256 inputs of them, a warp 32
            arrive(counter);
            const u16* base = o + (u64)(cluster * 64 + g) * HEADS * DIM + rank * 256 + warp * 32 + t * 8;
            uint4 w[1][8];
            load_weights(w, base, of_mixed);
            await(counter, ++phase * BLOCKS);
            copy_tokens(address(shared + AREA_B), 576, a.mixed + rank * 256, HEADS * DIM, 256, rows);
            close_copies();
            if (threadIdx.x < 80) {
                if (threadIdx.x < 64) fetch(down + (u64)(cluster * 64 + threadIdx.x) * HIDDEN + rank * 512, 1024);
                if (layer + 1 < depth)
                    fetch((const u16*)weights[layer * 4 + 4] + tile(threadIdx.x / 8) + threadIdx.x % 8 * WIDTH + part * 256, 512);
            }
            await_copies<0>();
            __syncthreads();
            float acc[4][8][4];
            multiply<8, 1, 4, 1, false>(acc, w, base, of_mixed, shared + AREA_B + warp * 64, 576, inverse, scale, scale);
            __syncthreads();
            float* sums = (float*)(shared + AREA_A);
            keep<8, 4>(acc, sums + warp * MOST_ROWS * 72, 0);
            __syncthreads();
            leave_sums<64, 8>(sums, left, rows);
            meet(group_counter, ++meetings * GROUP);
            end_sublayer(a, before.gate, cluster, rank, false);
        }
        {  // gate and up: a block has 32 outputs of each and all inputs, a warp 128 of them
            arrive(counter);
            const u16* base = gate_up + (u64)(block * 32 + g) * WIDTH + warp * 128 + t * 8;
            uint4 w[2][8];
            load_weights(w, base, gate_or_up);
            copy_vectors(between, 0, WIDTH);
            await(counter, ++phase * BLOCKS);
            copy_tokens(address(shared + AREA_B), 2112, a.stream, WIDTH, WIDTH, rows);
            close_copies();
            find_inverses(squares, rows);
            await_copies<0>();
            __syncthreads();
            float acc[4][8][4];
            multiply<8, 4, 4, 2, true>(acc, w, base, gate_or_up, shared + AREA_B + warp * 256, 2112, inverse,
                                       scale + warp * 128, scale + WIDTH + warp * 128);
            __syncthreads();
            float* sums = (float*)(shared + AREA_A);
            keep<8, 4>(acc, sums + warp * MOST_ROWS * 72, 0);
            __syncthreads();
            for (int i = threadIdx.x; i < rows * 16; i += THREADS) {
                const float* at = sums + i / 16 * 72 + i % 16 * 2;
                float2 gate = make_float2(0.f, 0.f), up = gate;
#pragma unroll
                for (int s = 0; s < 8; s++) {
                    const float2 p = *(const float2*)(at + s * MOST_ROWS * 72), q = *(const float2*)(at + s * MOST_ROWS * 72 + 32);
                    gate.x += p.x, gate.y += p.y, up.x += q.x, up.y += q.y;
                }
                auto bent = [](float v) {
                    const float twice = 1.5957691216057308f * (v + 0.044715f * v * v * v);
                    return v / (1.f + __expf(-fmaxf(twice, -80.f)));
                };
                *(u32*)(a.inner + (u64)(i / 16) * HIDDEN + block * 32 + i % 16 * 2) =
                    pack(bent(gate.x) * up.x, bent(gate.y) * up.y);
            }
        }
        {  // down: a cluster has 64 outputs, a block 512 inputs of them, a warp 64
            arrive(counter);
            const u16* base = down + (u64)(cluster * 64 + g) * HIDDEN + rank * 512 + warp * 64 + t * 8;
            uint4 w[2][8];
            load_weights(w, base, of_inner);
            await(counter, ++phase * BLOCKS);
            copy_tokens(address(shared + AREA_B), 1088, a.inner + rank * 512, HIDDEN, 512, rows);
            close_copies();
            await_copies<0>();
            __syncthreads();
            float acc[4][8][4];
            multiply<8, 2, 4, 2, false>(acc, w, base, of_inner, shared + AREA_B + warp * 128, 1088, inverse, scale, scale);
            __syncthreads();
            float* sums = (float*)(shared + AREA_A);
            keep<8, 4>(acc, sums + warp * MOST_ROWS * 72, 0);
            __syncthreads();
            leave_sums<64, 8>(sums, left, rows);
            meet(group_counter, ++meetings * GROUP);
            end_sublayer(a, between.gate, cluster, rank, layer + 1 == depth);
        }
    }
}
