// Attention of few queries over a slab of keys, one launch: a cluster of CL blocks has 64 packed queries (row r is query r %
// queries of head r / queries) and CL * KEYS columns, KEYS of them a block. Each sends its part of a row to the block that
// ends it: partial sums do not go through memory. Heads of 256.

// Four threads hold two neighbouring values each of every eight columns. Of four such words, of as many groups of columns,
// each thread gets a whole group of eight.
__device__ __forceinline__ uint4 gather(u32 a, u32 b, u32 c, u32 d) {
    bool odd = threadIdx.x & 1, far = threadIdx.x & 2;
    u32 near = __shfl_xor_sync(~0u, odd ? a : b, 1), other = __shfl_xor_sync(~0u, odd ? c : d, 1);
    uint2 first = odd ? uint2{near, b} : uint2{a, near}, second = odd ? uint2{other, d} : uint2{c, other};
    uint2 given = far ? first : second, kept = far ? second : first;
    uint2 got = {__shfl_xor_sync(~0u, given.x, 2), __shfl_xor_sync(~0u, given.y, 2)};
    return far ? uint4{got.x, got.y, kept.x, kept.y} : uint4{kept.x, kept.y, got.x, got.y};
}

// This block's part of each row to the block that ends the row: rounded, and since CL parts are added, their error is below
// the result's. :param sum, peak, weight: of rows `row` and row + 8. :param to, notes, barrier: where this
// block's parts belong there, and what counts them.
template <int CL>
__device__ __forceinline__ void send_part(
    const float (&sum)[128], const float (&peak)[2], const float (&weight)[2], u32 to, u32 notes, u32 barrier,
    int row) {
    constexpr int EACH = 64 / CL;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int r = row + h * 8;
        u32 there = in_block(to + r % EACH * 512, r / EACH), told = in_block(barrier, r / EACH);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float* at = sum + 16 * i + 2 * h;
            uint4 whole = gather(pack(at[0], at[1]), pack(at[4], at[5]), pack(at[8], at[9]), pack(at[12], at[13]));
            send16(there + ((4 * i + lane % 4 ^ r % 8) << 4), whole, told);
        }
        if (lane % 4 == 0) send2(in_block(notes + r % EACH * 8, r / EACH), peak[h], weight[h], told);
    }
}

template <int CL, int KEYS>
__global__ void __launch_bounds__(128) attend(
    const u16* query, Slab keys, Slab values, const i64* lengths, u16* out, int queries,
    int group, int kv_heads, int columns, float scale) {
    constexpr int DIM = 256, CHUNKS = DIM / 8, Q_BYTES = 64 * DIM * 2, K_BYTES = KEYS * DIM * 2, EACH = 64 / CL;
    static_assert(CL * EACH * DIM * 2 <= K_BYTES, "what is received takes the keys' place");
    extern __shared__ char chip[];
    start_next();
    u32 q = shared_at(chip) + (1024 - shared_at(chip) % 1024) % 1024, k = q + Q_BYTES, v = k + K_BYTES;
    u32 notes = v + K_BYTES, barrier = notes + 64 * 8;  // notes: peaks and weights of all blocks' parts of own rows
    int rank = blockIdx.x % CL, tile = blockIdx.x / CL, pair = blockIdx.y, batch = pair / kv_heads, kv = pair % kv_heads;
    int packed = group * queries, begin = rank * KEYS;
    int length = min(columns, static_cast<int>(lengths[batch])), end = max(begin, min(begin + KEYS, length));
    int old = max(begin, min(end, length - queries));  // columns below were written long ago
    if (threadIdx.x == 0) {
        make_barrier(barrier);
        show_barriers();
        expect(barrier, CL * EACH * (DIM * 2 + 8));
    }
    auto bring_columns = [&](u32 to, const Slab& slab, int from, int until) {
        const u16* at = slab.at + batch * slab.batch + kv * slab.head;
        for (int i = threadIdx.x; i < (until - from) * CHUNKS; i += 128) {
            int column = from + i / CHUNKS, c = i % CHUNKS;
            copy16(to + chunk_at(KEYS, column - begin, c), at + column * slab.column + c * 8);
        }
    };
    bring_columns(k, keys, begin, old);
    bring_columns(v, values, begin, old);
    commit_copies();
    for (int i = threadIdx.x; i < (begin + KEYS - end) * CHUNKS; i += 128) {  // weight 0 times what stands there would be NaN
        u32 at = v + chunk_at(KEYS, end - begin + i / CHUNKS, i % CHUNKS);
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
    wait_for_last();
    const u16* asked = query + (static_cast<i64>(pair) * packed + tile * 64) * DIM;
    for (int i = threadIdx.x; i < min(64, packed - tile * 64) * CHUNKS; i += 128)
        copy16(q + chunk_at(64, i / CHUNKS, i % CHUNKS), asked + i * 8);
    bring_columns(k, keys, old, end);
    commit_copies();
    bring_columns(v, values, old, end);
    commit_copies();
    wait_copies<1>();
    publish();
    __syncthreads();

    float logit[KEYS / 2];
    open_products();
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i)
        Mma<KEYS>::add(logit, panels(q + i / 4 * 64 * ROW + i % 4 * 32), panels(k + i / 4 * KEYS * ROW + i % 4 * 32), i > 0);
    commit_products();
    wait_products();
    ready();  // keys were read: their place may be written
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    float peak[2] = {NONE, NONE}, weight[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        int column = begin + i / 4 * 8 + lane % 4 * 2 + i % 2;
        logit[i] = column < end ? logit[i] * scale : NONE;
        peak[i / 2 % 2] = fmaxf(peak[i / 2 % 2], logit[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 1));
        peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 2));
    }
    u32 share[KEYS / 4];
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 2) {
        float top = peak[i / 2 % 2] == NONE ? 0.0f : peak[i / 2 % 2];
        float a = power_of_two(logit[i] - top), b = power_of_two(logit[i + 1] - top);
        weight[i / 2 % 2] += a + b;
        share[i / 2] = pack(a, b);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        weight[h] += __shfl_xor_sync(~0u, weight[h], 1);
        weight[h] += __shfl_xor_sync(~0u, weight[h], 2);
    }
    wait_copies<0>();
    publish();
    __syncthreads();
    float sum[DIM / 2];
    open_products();
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) Wide::add(sum, share + 4 * i, panels(v + i * 2048, KEYS * ROW), i > 0);
    commit_products();
    wait_products();
    meet();
    send_part<CL>(sum, peak, weight, k + rank * EACH * DIM * 2, notes + rank * EACH * 8, barrier, row);
    wait_bytes(barrier);
    for (int i = threadIdx.x; i < EACH * CHUNKS; i += 128) {
        int own = i / CHUNKS, r = rank * EACH + own, c = i % CHUNKS, place = tile * 64 + r;
        if (place >= packed) continue;
        float top = NONE, all = 0, mix[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
        for (int b = 0; b < CL; ++b) top = fmaxf(top, read2(notes + (b * EACH + own) * 8).x);
#pragma unroll
        for (int b = 0; b < CL; ++b) {
            float2 note = read2(notes + (b * EACH + own) * 8);
            uint4 part = read16(k + (b * EACH + own) * DIM * 2 + ((c ^ r % 8) << 4));
            float f = power_of_two(note.x - top);
            all += f * note.y;
            mix[0] += f * low_of(part.x), mix[1] += f * high_of(part.x), mix[2] += f * low_of(part.y), mix[3] += f * high_of(part.y);
            mix[4] += f * low_of(part.z), mix[5] += f * high_of(part.z), mix[6] += f * low_of(part.w), mix[7] += f * high_of(part.w);
        }
        float f = 1.0f / all;
        i64 to = static_cast<i64>(batch * queries + place % queries) * (kv_heads * group) + kv * group + place / queries;
        *reinterpret_cast<uint4*>(out + to * DIM + c * 8) = {pack(mix[0] * f, mix[1] * f), pack(mix[2] * f, mix[3] * f),
                                                             pack(mix[4] * f, mix[5] * f), pack(mix[6] * f, mix[7] * f)};
    }
}
